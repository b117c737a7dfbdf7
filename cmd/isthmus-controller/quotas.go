package main

import (
	"context"
	"errors"
	"log/slog"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/controlplane/broker/quotacontroller"
)

// runQuotaController runs the quota controller of a broker and the HTTP server until ctx ends.
func runQuotaController(ctx context.Context, s settings, local *rest.Config, log *slog.Logger) error {
	if s.federation || s.machines != "" {
		return errors.New("--quota-controller runs the quota controller alone; omit --federation and --machines")
	}
	c, err := quotacontroller.New(quotacontroller.Config{REST: local, Namespace: s.namespace, Grace: s.aggregateGrace, Log: log})
	if err != nil {
		return err
	}
	server, err := newServer(ctx, s, local, func() status.Controller { return describeQuotas(c.State()) }, log)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Serve(ctx) })
	group.Go(func() error { return c.Run(ctx) })
	return group.Wait()
}

// describeQuotas converts the State of a quota controller into a status. A standby is ready.
func describeQuotas(s quotacontroller.State) status.Controller {
	c := status.Controller{Version: version.String(), Leader: s.Leader, Ready: s.Waiting == ""}
	if s.Waiting != "" {
		c.Waiting = []string{s.Waiting}
	}
	return c
}
