// Command coredns is CoreDNS with the plugins a cluster DNS of the lab needs and no others: the
// stock binary links the SDKs of several clouds, which triples its build time.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
)

// The order of the directives is the order in which plugins see a query; it is that of the stock binary.
func init() {
	dnsserver.Directives = []string{
		"reload", "bind", "health", "ready", "prometheus", "errors", "log", "cache", "loadbalance", "loop",
		"kubernetes", "forward",
	}
}

func main() { coremain.Run() }
