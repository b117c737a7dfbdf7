// Package program is what the controllers' mains have in common: their logger, the cluster that they work for, and the
// HTTP door through which they are looked at.
package program

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
)

// shutdownTimeout is how long a running request may keep the process from ending.
const shutdownTimeout = 5 * time.Second

// Logger returns the process's logger, through which client-go and controller-runtime speak too. The format is that of
// --log-format: text or json.
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

// Cluster returns the access to this cluster: that of the pod, or of the file of --kubeconfig.
func Cluster(path string) (*rest.Config, error) {
	if path == "" {
		cfg, err := rest.InClusterConfig()
		switch {
		case errors.Is(err, rest.ErrNotInCluster):
			return nil, errors.New("this is not a pod; name this cluster by --kubeconfig")
		case err != nil:
			return nil, fmt.Errorf("this pod's access to its cluster is not complete; give it a service account token, or name the cluster by --kubeconfig: %w", err)
		}
		return cfg, nil
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("--kubeconfig=%s does not exist; give it the path of this cluster's kubeconfig", path)
	case err != nil:
		return nil, fmt.Errorf("--kubeconfig=%s cannot be used; correct it or name another: %w", path, err)
	}
	return cfg, nil
}

// Listen opens the address of --listen.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s; choose another address with --listen: %w", address, err)
	}
	return listener, nil
}

// Serve answers HTTP until ctx ends.
func Serve(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: shutdownTimeout}
	stopped := make(chan error, 1)
	go func() {
		<-ctx.Done()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		stopped <- server.Shutdown(ctx)
	}()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	}
	if err := <-stopped; err != nil {
		return fmt.Errorf("end http requests: %w", err)
	}
	return nil
}
