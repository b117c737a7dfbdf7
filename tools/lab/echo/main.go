// Echo says who answers, and counts who answered: the two ends of every connectivity test.
//
//	echo-server serve --http :8080 --tcp :9000 --udp :9000
//	echo-server client --connections 10000 --concurrency 8 --url http://hello.demo.svc.clusterset.local
//	echo-server client --connections 100 --tcp 243.0.0.1:9000
//
// The server answers every request, connection or datagram with one line,
//
//	cluster=a node=a1 pod=hello-1 ip=10.201.1.5 client=10.202.1.7:40000
//
// taken from the environment variables CLUSTER, NODE, POD and POD_IP. The client opens a
// new connection each time, unless told to keep UDP sockets or to hold a connection, and prints one JSON object, see
// Report; who answers first stands on standard error at once. A signal ends it as its --duration does.
package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/tools/cli"
)

func main() { cli.Main(command()) }

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "echo-server",
		Short: "Say who answers, and count who answered",
	}
	root.AddCommand(serveCommand(), clientCommand())
	return root
}

func serveCommand() *cobra.Command {
	s := Server{Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	cmd := &cobra.Command{
		Use:     "serve",
		Short:   "Answer HTTP, TCP and UDP with one line that names this pod",
		Example: "  echo-server serve --http :8080 --tcp :9000 --udp :9000",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s.Identity = identityFromEnv()
			return s.Run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&s.HTTP, "http", "", "address for HTTP; /healthz answers ok, /stream?seconds=N is a download for so long, /upload takes what is put there")
	cmd.Flags().StringVar(&s.TCP, "tcp", "", "address for TCP: the line, then close")
	cmd.Flags().StringVar(&s.UDP, "udp", "", "address for UDP: the line for each datagram")
	return cmd
}

func clientCommand() *cobra.Command {
	var c Client
	cmd := &cobra.Command{
		Use:     "client",
		Short:   "Open new connections and report the answers as JSON",
		Example: "  echo-server client --connections 1000 --concurrency 4 --url http://243.0.0.1",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.Validate(); err != nil {
				return err
			}
			c.First = func(backend string) { fmt.Fprintln(cmd.ErrOrStderr(), backend) }
			enc := json.NewEncoder(cmd.OutOrStdout())
			enc.SetIndent("", "  ")
			return enc.Encode(c.Run(cmd.Context()))
		},
	}
	cmd.Flags().IntVar(&c.Connections, "connections", 0, "how many connections to make (0: as many as fit the duration)")
	cmd.Flags().IntVar(&c.Minimum, "minimum", 0, "make at least this many connections, also after --duration or an interrupt")
	cmd.Flags().DurationVar(&c.Duration, "duration", 0, "stop after this time (0: when all connections are made)")
	cmd.Flags().IntVar(&c.Concurrency, "concurrency", 1, "connections at the same time")
	cmd.Flags().Float64Var(&c.Rate, "rate", 0, "connections a second at most (0: as fast as they go)")
	cmd.Flags().DurationVar(&c.Timeout, "timeout", defaultTimeout, "of one connection, from the name to the answer")
	cmd.Flags().StringVar(&c.URL, "url", "", "http URL to get")
	cmd.Flags().StringVar(&c.TCP, "tcp", "", "HOST:PORT to read a line from")
	cmd.Flags().StringVar(&c.UDP, "udp", "", "HOST:PORT to exchange a datagram with")
	cmd.Flags().StringVar(&c.Lookup, "lookup", "", "name to ask the addresses of")
	cmd.Flags().BoolVar(&c.Keep, "keep", false, "keep each UDP socket, and connect anew when it fails")
	cmd.Flags().BoolVar(&c.Hold, "hold", false, "send all requests over one connection, and fail once it is lost")
	cmd.Flags().BoolVar(&c.Multipath, "multipath", false, "ask for Multipath TCP, and fail when it is not spoken")
	cmd.Flags().BoolVar(&c.Mapped, "mapped", false, "connect to an IPv4 address by a socket of IPv6")
	return cmd
}
