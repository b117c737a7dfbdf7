package federation

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// The log of the federation's guard names the federation's own command.
func TestGuardNamesTheFederationsCommand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text strings.Builder
		g := withdrawal.New(guarded[int](1, slog.New(slog.NewTextHandler(&text, nil))))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- g.Run(ctx) }()
		for i := range 10 {
			g.Offered("c", i)
		}
		<-time.After(time.Minute)
		for i := range 10 {
			g.Vanished("c", i)
		}
		<-time.After(time.Minute)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if said := text.String(); !strings.Contains(said, "isthmusctl federation release") || strings.Contains(said, "release-hold") {
			t.Errorf("it says %s", said)
		}
	})
}
