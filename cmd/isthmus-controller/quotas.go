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
	return runBeside(ctx, s, local, func() (bool, string) { state := c.State(); return state.Leader, state.Waiting }, c.Run, log)
}

// runBeside runs a controller beside a broker, and the HTTP server, until ctx ends. state tells whether it leads, and why it does not
// act then; a standby is ready.
func runBeside(ctx context.Context, s settings, local *rest.Config, state func() (leader bool, waiting string), run func(context.Context) error, log *slog.Logger) error {
	server, err := newServer(ctx, s, local, func() status.Controller {
		leader, waiting := state()
		c := status.Controller{Version: version.String(), Leader: leader, Ready: waiting == ""}
		if waiting != "" {
			c.Waiting = []string{waiting}
		}
		return c
	}, log)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Serve(ctx) })
	group.Go(func() error { return run(ctx) })
	return group.Wait()
}
