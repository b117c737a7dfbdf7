package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
)

// recordsCommand returns `isthmus-agent show records`. It asks the agent, which has the zone in memory.
func recordsCommand(cfg *Config, format *string) *cobra.Command {
	return &cobra.Command{
		Use:   "records [NAME]",
		Short: "Show the records of this node's name server as a zone file",
		Long: `Show the records of this node's name server as lines of a zone file: all, or those at NAME and below. The command asks
the agent on this node, at the address of --http-listen.`,
		Example: `  isthmus-agent show records
  isthmus-agent show records hello.demo.svc.clusterset.local -o json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := tables.CheckFormat(*format); err != nil {
				return err
			}
			name := strings.Join(args, "")
			all, err := askRecords(cmd.Context(), cfg.HTTPListen, cfg.HTTP.Insecure, name)
			if err != nil {
				return err
			}
			if *format == "json" {
				out := json.NewEncoder(cmd.OutOrStdout())
				out.SetIndent("", "  ")
				return out.Encode(all)
			}
			if len(all) == 0 && name != "" {
				return fmt.Errorf("there are no records at %s or below", name)
			}
			return all.WriteZone(cmd.OutOrStdout())
		},
	}
}

// askRecords asks the agent of this node, which listens at listen.
func askRecords(ctx context.Context, listen string, insecure bool, name string) (status.Records, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, fmt.Errorf("--http-listen=%s is not host:port, such as :%d", listen, status.AgentPort)
	}
	if addr, err := netip.ParseAddr(host); host == "" || err == nil && addr.IsUnspecified() {
		host = "localhost"
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	scheme := "https"
	if insecure {
		scheme = "http"
	}
	at := scheme + "://" + net.JoinHostPort(host, port) + status.RecordsPath + "?name=" + url.QueryEscape(name)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, err
	}
	resp, err := httpserver.LocalClient().Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask the agent of this node: %w; check that it runs, and that --http-listen and --insecure-http are the same as the agent's", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("read the answer of this node's agent: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, errors.New("this node's agent answers: " + strings.TrimSpace(string(body)))
	}
	var all status.Records
	if err := json.Unmarshal(body, &all); err != nil {
		return nil, fmt.Errorf("read the answer of this node's agent: %w", err)
	}
	return all, nil
}
