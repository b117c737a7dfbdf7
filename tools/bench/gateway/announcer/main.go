// Command announcer runs one announcer of a gateway without the rest. The gateway benchmark starts it, as bgp or
// vrrp:FOLDER.
package main

import (
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/isthmus-net/isthmus/gateway/bgp"
	"github.com/isthmus-net/isthmus/gateway/vrrp"
	"github.com/isthmus-net/isthmus/tools/netlab/subprocess"
)

func main() {
	subprocess.Main(func(argument string) subprocess.Announcer {
		log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
		kind, how, _ := strings.Cut(argument, ":")
		if kind == "bgp" {
			return bgp.New(bgp.Config{Log: log})
		}
		r, err := vrrp.New(vrrp.Config{Dir: how, Log: log})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return r
	})
	fmt.Fprintln(os.Stderr, "announcer: the benchmark starts it: go run ./tools/bench gateway")
	os.Exit(1)
}
