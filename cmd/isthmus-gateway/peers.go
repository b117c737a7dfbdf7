package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// peersPath serves the peers of this gateway, beside its metrics.
const peersPath = "/peers"

// peersCommand is `isthmus-gateway show peers`.
func peersCommand(cfg *Config) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "peers",
		Short: "Show the exchange of connections with the other gateways of the group",
		Long: `Show the exchange of connections with the other gateways of the group, as the gateway running on this
machine reports it on --http-listen. A peer does not know the QUEUED connections yet, and receives none while
there is a FAULT: those may break when this gateway dies.`,
		Example: `  isthmus-gateway show peers
  isthmus-gateway show peers -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			s, err := fetchPeers(cmd.Context(), cfg.HTTPListen, cfg.Insecure)
			if err != nil {
				return fmt.Errorf("ask the gateway on this machine, at --http-listen: %w", err)
			}
			return tables.Write(cmd.OutOrStdout(), peers(s.Peers), format)
		},
	}
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// fetchPeers asks the gateway that listens at an address of this machine.
func fetchPeers(ctx context.Context, listen string, insecure bool) (s flows.Stats, err error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return s, err
	}
	if host == "" {
		host = "localhost"
	}
	const timeout = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	scheme := "https://"
	if insecure {
		scheme = "http://"
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+net.JoinHostPort(host, port)+peersPath, nil)
	if err != nil {
		return s, err
	}
	response, err := httpserver.LocalClient().Do(request)
	if err != nil {
		return s, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return s, fmt.Errorf("%s answers %s", request.URL, response.Status)
	}
	return s, json.NewDecoder(response.Body).Decode(&s)
}

// peers are the rows of show peers.
type peers []flows.PeerStats

// Header implements tables.Table.
func (peers) Header() []string {
	return []string{"GATEWAY", "URL", "SENT", "RECEIVED", "QUEUED", "DROPPED", "FAILED", "FAULT"}
}

// Rows implements tables.Table.
func (p peers) Rows() [][]string {
	rows := make([][]string, len(p))
	for i, r := range p {
		rows[i] = []string{r.Gateway, r.URL, fmt.Sprint(r.Sent), fmt.Sprint(r.Received), fmt.Sprint(r.Queued), fmt.Sprint(r.Dropped), fmt.Sprint(r.Failed), r.Fault}
	}
	return rows
}

// Nothing implements tables.Table.
func (peers) Nothing() string { return "this gateway is alone in its group" }
