package main

import (
	"context"
	"errors"
	"log/slog"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/controlplane/broker/lighthouse"
)

// runBridge runs the bridge to the clusters of Submariner's Lighthouse and the HTTP server until ctx ends.
func runBridge(ctx context.Context, s settings, local *rest.Config, log *slog.Logger) error {
	if s.federation || s.machines != "" || s.quotaController {
		return errors.New("--lighthouse-bridge runs the bridge alone; omit --federation, --machines and --quota-controller")
	}
	b, err := lighthouse.New(lighthouse.Config{REST: local, Namespace: s.namespace, Lighthouse: s.lighthouse, Settings: s.broker, Log: log})
	if err != nil {
		return err
	}
	server, err := newServer(ctx, s, local, func() status.Controller { return describeBridge(b.State()) }, log)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Serve(ctx) })
	group.Go(func() error { return b.Run(ctx) })
	return group.Wait()
}

// describeBridge converts the State of a bridge into a status. A standby is ready.
func describeBridge(s lighthouse.State) status.Controller {
	c := status.Controller{Version: version.String(), Leader: s.Leader, Ready: s.Waiting == ""}
	if s.Waiting != "" {
		c.Waiting = []string{s.Waiting}
	}
	return c
}
