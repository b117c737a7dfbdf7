// Nameserver runs one of the servers of the DNS benchmark in a separate process. It answers at an address until its standard input
// ends:
//
//	nameserver -listen ADDR -mode echo                     sends every packet back
//	nameserver -listen ADDR -mode serve -services N        package dns with N Services
//	nameserver -listen ADDR -mode kept -file FILE          package dns with a saved zone; writes {} when at rest
//	nameserver -listen ADDR -mode change -services N       as serve; writes the times from change to answer as JSON
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
)

const (
	// changes is the number of measured changes.
	changes = 200
	// pace is the shortest time between two snapshots on a node (see package view).
	pace = 50 * time.Millisecond
)

func main() {
	listen := flag.String("listen", "", "the `address` and port to answer on")
	mode := flag.String("mode", "serve", "echo, serve, kept or change")
	file := flag.String("file", "", "the file with the saved zone")
	var set names.Set
	flag.IntVar(&set.Services, "services", 0, "the number of Services")
	flag.IntVar(&set.Endpoints, "endpoints", 0, "the number of endpoints of the headless Service")
	flag.Parse()
	if err := run(*listen, *mode, *file, set, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "nameserver:", err)
		os.Exit(1)
	}
}

func run(listen, mode, file string, set names.Set, in io.Reader, out io.Writer) error {
	at, err := netip.ParseAddrPort(listen)
	if err != nil {
		return fmt.Errorf("-listen: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	if mode == "echo" {
		return echo(ctx, at)
	}
	// One client sends as fast as it can. The rate limiter's cost counts, but its limit is never reached.
	limits := dns.DefaultLimits
	limits.Rate = math.MaxInt32
	server, err := dns.New(dns.Config{Listen: []netip.AddrPort{at}, TTL: dns.DefaultTTL, File: file, Limits: limits})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	if mode != "kept" {
		snap := set.Snapshot()
		if err := server.Sync(ctx, snap); err != nil {
			return err
		}
		if mode == "change" {
			if err := change(ctx, server, set, at, out); err != nil {
				return err
			}
		}
	}
	debug.FreeOSMemory() // as the Go runtime does over time
	if mode == "kept" {
		if err := json.NewEncoder(out).Encode(struct{}{}); err != nil {
			return err
		}
	}
	return <-ended
}

// echo sends every packet back.
func echo(ctx context.Context, at netip.AddrPort) error {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	packet := make([]byte, 64<<10)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(packet)
		if err == nil {
			_, err = conn.WriteToUDPAddrPort(packet[:n], from)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// change changes one Service after another and writes the times from the new snapshot to the new answer, sorted.
func change(ctx context.Context, server *dns.Server, set names.Set, at netip.AddrPort, out io.Writer) error {
	conn, err := new(net.Dialer).DialContext(ctx, "udp", at.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	snap := set.Snapshot()
	var took []time.Duration
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for n := range changes {
		<-tick.C
		i := n * 7919 % set.Services
		snap = names.Changed(snap, i, 1+n/set.Services)
		want := names.Address(i, 1+n/set.Services).As4()
		begin := time.Now()
		if err := server.Sync(ctx, snap); err != nil {
			return err
		}
		for {
			answer, err := exchange(conn, names.Ask(names.Name(i), names.TypeA, false))
			if err != nil {
				return err
			}
			if bytes.HasSuffix(answer, want[:]) {
				break
			}
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	return json.NewEncoder(out).Encode(took)
}

// exchange sends a question and returns the answer.
func exchange(conn net.Conn, question []byte) ([]byte, error) {
	const timeout = 5 * time.Second
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	if _, err := conn.Write(question); err != nil {
		return nil, err
	}
	answer := make([]byte, 4096)
	n, err := conn.Read(answer)
	return answer[:n], err
}
