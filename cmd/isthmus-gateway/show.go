package main

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// showCommand is `isthmus-gateway show`. It reads the disk, so it works with and without a running gateway.
func showCommand(cfg *Config) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the state applied last on this gateway",
		Long: `Show the state applied last on this gateway, read from its disk.

FAILOVER says what happens to connections when this gateway dies. "kept" ones continue at another gateway of
the group, even if other backends have changed since they began. "broken" ones are masqueraded with this
gateway's own address, to which backends reply: they end with it.`,
		Example: `  isthmus-gateway show
  isthmus-gateway show peers
  isthmus-gateway show -o json --state-dir=/var/lib/isthmus-gateway`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			b, err := os.ReadFile(cfg.statePath())
			if err != nil {
				return fmt.Errorf("no state was applied on this gateway yet, or not with this --state-dir: %w", err)
			}
			r, err := desired.Parse(b, nil)
			if err != nil {
				return fmt.Errorf("%s: %w", cfg.statePath(), err)
			}
			return tables.Write(cmd.OutOrStdout(), frontendsOf(&r.State), format)
		},
	}
	cmd.AddCommand(peersCommand(cfg))
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// frontends are the rows of show.
type frontends []frontend

// frontend is one row: a port of a VIP.
type frontend struct {
	VIP      netip.Addr       `json:"vip"`
	Protocol string           `json:"protocol"`
	Port     uint16           `json:"port"`
	Service  string           `json:"service"`
	Announce desired.Announce `json:"announce"`
	Return   desired.Return   `json:"return"`
	Backends int              `json:"backends"` // that accept new connections
	Draining int              `json:"draining"`
	Failover string           `json:"failover"` // kept or broken
}

func frontendsOf(s *desired.State) frontends {
	rows := frontends{}
	for i := range s.VIPs {
		v := &s.VIPs[i]
		for j := range v.Frontends {
			f := &v.Frontends[j]
			row := frontend{VIP: v.Addr, Protocol: f.Protocol, Port: f.Port, Service: f.Service, Announce: v.Announce, Return: v.Return, Failover: "kept"}
			if v.Return == desired.Masquerade {
				row.Failover = "broken"
			}
			for _, b := range f.Backends {
				if b.Draining {
					row.Draining++
				} else {
					row.Backends++
				}
			}
			rows = append(rows, row)
		}
	}
	return rows
}

// Header implements tables.Table.
func (frontends) Header() []string {
	return []string{"VIP", "PORT", "SERVICE", "ANNOUNCE", "RETURN", "BACKENDS", "DRAINING", "FAILOVER"}
}

// Rows implements tables.Table.
func (f frontends) Rows() [][]string {
	rows := make([][]string, len(f))
	for i, r := range f {
		rows[i] = []string{
			r.VIP.String(), fmt.Sprintf("%d/%s", r.Port, r.Protocol), r.Service, string(r.Announce), string(r.Return),
			fmt.Sprint(r.Backends), fmt.Sprint(r.Draining), r.Failover,
		}
	}
	return rows
}

// Nothing implements tables.Table.
func (frontends) Nothing() string { return "this gateway has no VIPs" }
