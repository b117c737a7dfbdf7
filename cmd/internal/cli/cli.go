// Package cli holds the parts that the main packages of the controllers share: the main function, the logger, the client
// configuration of the cluster, and the HTTP server for probes, metrics and status.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/httpserver/reviews"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
)

// Main runs a root command until it returns, or until SIGINT or SIGTERM cancels its context. It exits with 1 after an error.
func Main(cmd *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", cmd.Name(), err)
		os.Exit(1)
	}
}

// Logger returns the logger of the process, and makes client-go and controller-runtime use it too. The format is the value
// of --log-format: text or json.
func Logger(format string, level slog.Level, w io.Writer) (*slog.Logger, error) {
	options := &slog.HandlerOptions{Level: level}
	var handler slog.Handler
	switch format {
	case "text":
		handler = slog.NewTextHandler(w, options)
	case "json":
		handler = slog.NewJSONHandler(w, options)
	default:
		return nil, fmt.Errorf("--log-format=%s is unknown; use text or json", format)
	}
	klog.SetLogger(logr.FromSlogHandler(handler))
	ctrl.SetLogger(logr.FromSlogHandler(handler).V(-int(slog.LevelDebug)))
	return slog.New(handler), nil
}

// Cluster returns the client configuration of this cluster: from the kubeconfig at path, or, if path is empty, from the
// ServiceAccount of the pod.
func Cluster(path string) (*rest.Config, error) {
	if path == "" {
		cfg, err := rest.InClusterConfig()
		switch {
		case errors.Is(err, rest.ErrNotInCluster):
			return nil, errors.New("this process does not run in a pod; give the kubeconfig of this cluster with --kubeconfig")
		case err != nil:
			return nil, fmt.Errorf("the ServiceAccount of this pod is not mounted completely; mount its token, or give --kubeconfig: %w", err)
		}
		return cfg, nil
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("--kubeconfig=%s does not exist; give the path of this cluster's kubeconfig", path)
	case err != nil:
		return nil, fmt.Errorf("--kubeconfig=%s is not valid; correct it or give another file: %w", path, err)
	}
	return cfg, nil
}

// Listen opens the address of the flag --listen.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s; choose another address with --listen: %w", address, err)
	}
	return listener, nil
}

// NewServer returns the HTTP server of a controller, with its metrics and probes. It expects tokens for an audience. A process is
// not ready while waiting returns reasons, which /readyz lists.
func NewServer(l net.Listener, f httpserver.Flags, cluster *rest.Config, audience string, waiting func() []string, log *slog.Logger, more ...prometheus.Collector) (*httpserver.Server, error) {
	config, err := f.Config(log)
	if err != nil {
		return nil, err
	}
	access, err := reviews.New(cluster, audience)
	if err != nil {
		return nil, err
	}
	s := httpserver.New(httpserver.Config{Listener: l, TLS: config, Access: access, Open: f.Open(), Log: log})
	own := prometheus.NewRegistry() // a process of a test has several servers
	own.MustRegister(append(more, s.Metrics(), version.Metric())...)
	s.Handle("GET /metrics", promhttp.HandlerFor(prometheus.Gatherers{metrics.Registry, own}, promhttp.HandlerOpts{}))
	s.Probe("/readyz", waiting)
	return s, nil
}
