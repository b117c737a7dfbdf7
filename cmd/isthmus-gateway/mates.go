package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// matesPath is where a gateway tells of the others of its group, beside its metrics.
const matesPath = "/mates"

// matesCommand is `isthmus-gateway show mates`.
func matesCommand(cfg *Config) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "mates",
		Short: "Show what this gateway and the others of its group tell one another of connections",
		Long: `Show what this gateway and the others of its group tell one another of connections, as the gateway that runs
here says it on --http-listen. What BEHIND counts another gateway does not know yet, and none of it while
there is a FAULT: these connections may break when this gateway dies.`,
		Example: `  isthmus-gateway show mates
  isthmus-gateway show mates -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			s, err := askMates(cmd.Context(), cfg.HTTPListen)
			if err != nil {
				return fmt.Errorf("ask the gateway that runs here, at --http-listen: %w", err)
			}
			return tables.Write(cmd.OutOrStdout(), mates(s.Mates), format)
		},
	}
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// askMates asks the gateway that listens at an address of this machine.
func askMates(ctx context.Context, listen string) (s flows.Sight, err error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return s, err
	}
	if host == "" {
		host = "localhost"
	}
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+matesPath, nil)
	if err != nil {
		return s, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return s, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return s, fmt.Errorf("%s says %s", request.URL, response.Status)
	}
	return s, json.NewDecoder(response.Body).Decode(&s)
}

// mates are the rows of show mates.
type mates []flows.MateSight

// Header is part of tables.Table.
func (mates) Header() []string {
	return []string{"GATEWAY", "URL", "SENT", "RECEIVED", "BEHIND", "LEFT OUT", "FAILED", "FAULT"}
}

// Rows is part of tables.Table.
func (m mates) Rows() [][]string {
	rows := make([][]string, len(m))
	for i, r := range m {
		rows[i] = []string{r.Gateway, r.URL, fmt.Sprint(r.Sent), fmt.Sprint(r.Received), fmt.Sprint(r.Behind), fmt.Sprint(r.LeftOut), fmt.Sprint(r.Failed), r.Fault}
	}
	return rows
}

// Nothing is part of tables.Table.
func (mates) Nothing() string { return "this gateway has no other beside it" }
