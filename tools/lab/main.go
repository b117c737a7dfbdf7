// Lab runs real Kubernetes clusters on one Debian machine, without a container engine.
// See README.md beside this file.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/tools/lab/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := command().ExecuteContext(ctx)
	var exit exitStatus
	switch {
	case errors.As(err, &exit):
		os.Exit(int(exit)) // the command has spoken for itself
	case err != nil:
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var cfg cluster.Config
	root := &cobra.Command{
		Use:           "lab",
		Short:         "Real Kubernetes clusters on one Debian machine",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&cfg.Name, "name", "", `name of the lab; labs of different names run side by side (default "lab")`)
	root.PersistentFlags().StringVar(&cfg.Dir, "dir", "", "directory of all labs and their cache (default $"+cluster.DirVariable+" or /var/tmp/isthmus)")
	open := func(cmd *cobra.Command) (*cluster.Lab, error) {
		cfg.Progress = cmd.ErrOrStderr()
		return cluster.Open(cfg)
	}
	root.AddCommand(
		upCommand(&cfg, open), buildCommand(open), downCommand(open), statusCommand(open),
		kubectlCommand(open), nodeCommand(open), loadCommand(open),
		cutCommand(open), healCommand(open), stopCommand(open), startCommand(open),
	)
	return root
}

type opener func(*cobra.Command) (*cluster.Lab, error)

func upCommand(cfg *cluster.Config, open opener) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "up",
		Short:   "Bring the lab up, or restart what died in it",
		Example: "  go run ./tools/lab up\n  go run ./tools/lab --name small up --topology \"a:1 broker:0\"",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := open(cmd)
			if err != nil {
				return err
			}
			if err := l.Up(cmd.Context()); err != nil {
				return err
			}
			for _, c := range l.Topology() {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", c.Name, l.Kubeconfig(c.Name))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&cfg.Topology, "topology", "", `clusters and their number of nodes (default "a:2 b:1 broker:0")`)
	cmd.Flags().StringVar(&cfg.ProxyMode, "proxy-mode", "", "kube-proxy's mode: nftables (default) or iptables")
	cmd.Flags().StringVar(&cfg.CNI, "cni", "", "main CNI plugin: ptp (default) or bridge")
	return cmd
}

func buildCommand(open opener) *cobra.Command {
	return &cobra.Command{
		Use:     "build PROGRAM",
		Short:   "Build a program that only some tests need (" + strings.Join(cluster.OptionalPrograms(), ", ") + "), and print its path",
		Example: "  go run ./tools/lab build " + cluster.ExternalDNS,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := open(cmd)
			if err != nil {
				return err
			}
			path, err := l.Build(cmd.Context(), args[0])
			if err == nil {
				fmt.Fprintln(cmd.OutOrStdout(), path)
			}
			return err
		},
	}
}

func downCommand(open opener) *cobra.Command {
	return &cobra.Command{
		Use:     "down",
		Short:   "Remove the lab and everything it made, except the cache",
		Example: "  go run ./tools/lab down",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := open(cmd)
			if err != nil {
				return err
			}
			return l.Down(cmd.Context())
		},
	}
}

func statusCommand(open opener) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show clusters, nodes and components; exit 1 unless everything is up",
		Example: "  go run ./tools/lab status\n  go run ./tools/lab status -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("output %q is neither text nor json", output)
			}
			l, err := open(cmd)
			if err != nil {
				return err
			}
			s, err := l.Status(cmd.Context())
			if err != nil {
				return err
			}
			if err := printStatus(cmd.OutOrStdout(), s, output); err != nil {
				return err
			}
			if !s.Up {
				return fmt.Errorf("lab %q is not all up", s.Name)
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func printStatus(out io.Writer, s cluster.Status, format string) error {
	if format == "json" {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(s)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CLUSTER\tMACHINE\tIPV4\tSTATE\tCOMPONENTS")
	for _, c := range s.Clusters {
		state := "api not ready"
		if c.APIReady {
			state = "api ready"
		}
		printMachine(w, c.Name, c.ControlPlane, state)
		for _, n := range c.Nodes {
			state := "not ready"
			if n.Ready {
				state = "ready"
			}
			printMachine(w, c.Name, n.MachineStatus, state)
		}
	}
	return w.Flush()
}

func printMachine(w io.Writer, name string, m cluster.MachineStatus, state string) {
	switch {
	case !m.Running:
		state = "down"
	case !m.Connected:
		state = "cut, " + state
	}
	var components []string
	for _, c := range m.Components {
		text := c.Name
		if !c.Alive {
			text += " (" + c.Exit + ")"
		}
		components = append(components, text)
	}
	fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", name, m.Name, m.IPv4, state, strings.Join(components, ", "))
}

func kubectlCommand(open opener) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "kubectl CLUSTER ARG...",
		Short:   "Run kubectl against a cluster",
		Example: "  go run ./tools/lab kubectl a get pods -A -o wide",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := open(cmd)
			if err != nil {
				return err
			}
			return run(l.Kubectl(cmd.Context(), args[0], args[1:]...))
		},
	}
	// What follows the first word belongs to the other program, flags too.
	cmd.Flags().SetInterspersed(false)
	return cmd
}

func nodeCommand(open opener) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "node NODE COMMAND...",
		Short:   "Run a command on a node, in its namespaces and cgroups",
		Example: "  go run ./tools/lab node a1 bash\n  go run ./tools/lab node a1 -- bpftool map list",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := open(cmd)
			if err != nil {
				return err
			}
			argv := args[1:]
			if argv[0] == "--" { // cobra leaves it in place behind a first word
				argv = argv[1:]
			}
			return run(l.NodeCommand(cmd.Context(), args[0], argv...))
		},
	}
	// What follows the first word belongs to the other program, flags too.
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// exitStatus is the failure of a program we ran for the user, and becomes ours.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// run gives a command our terminal and returns its exit.
func run(cmd *exec.Cmd) error {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 {
		return exitStatus(exit.ExitCode())
	}
	return err
}

func loadCommand(open opener) *cobra.Command {
	return &cobra.Command{
		Use:     "load ARCHIVE...",
		Short:   "Give every node the images of OCI archives",
		Example: "  go run ./tools/images -o bin/images\n  go run ./tools/lab load bin/images/agent.tar bin/images/controller.tar",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := open(cmd)
			if err != nil {
				return err
			}
			return l.LoadImages(cmd.Context(), args...)
		},
	}
}

func cutCommand(open opener) *cobra.Command {
	return linkCommand(open, "cut", "Take a node off the network", (*cluster.Lab).Cut)
}

func healCommand(open opener) *cobra.Command {
	return linkCommand(open, "heal", "Bring a node back to the network", (*cluster.Lab).Heal)
}

func linkCommand(open opener, verb, short string, do func(*cluster.Lab, context.Context, string) error) *cobra.Command {
	return &cobra.Command{
		Use:     verb + " NODE",
		Short:   short,
		Example: "  go run ./tools/lab " + verb + " a2",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := open(cmd)
			if err != nil {
				return err
			}
			return do(l, cmd.Context(), args[0])
		},
	}
}

func stopCommand(open opener) *cobra.Command {
	return componentCommand(open, "stop", "Stop one component of a node or control plane", (*cluster.Lab).Stop)
}

func startCommand(open opener) *cobra.Command {
	cmd := componentCommand(open, "start", "Start one component of a node or control plane", (*cluster.Lab).Start)
	cmd.Long += " A kube-apiserver is ready\nwhen this returns, unless its machine is cut off; the other components run, no more."
	return cmd
}

func componentCommand(open opener, verb, short string, do func(*cluster.Lab, context.Context, string, string) error) *cobra.Command {
	return &cobra.Command{
		Use:     verb + " NODE COMPONENT",
		Short:   short,
		Long:    short + ". A control plane's machine has the name of its cluster.",
		Example: "  go run ./tools/lab " + verb + " a1 kubelet\n  go run ./tools/lab " + verb + " broker kube-apiserver",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := open(cmd)
			if err != nil {
				return err
			}
			return do(l, cmd.Context(), args[0], args[1])
		},
	}
}
