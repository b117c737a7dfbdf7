package main

import (
	"context"
	"errors"
	"log/slog"

	"k8s.io/client-go/rest"

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
	return runBeside(ctx, s, local, func() (bool, string) { state := b.State(); return state.Leader, state.Waiting }, b.Run, log)
}
