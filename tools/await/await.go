// Package await lets tests wait for a state that they have to ask for.
//
// For example, await.True(t, "the policy is in force", refused) asks every 20 ms at first, and four times a second once it has
// waited for two seconds. Tests run beside each other, so the servers that they ask spend on answers what the others need.
package await

import (
	"context"
	"errors"
	"testing"
	"time"
)

// Patience is how long tests wait on a busy machine.
const Patience = 2 * time.Minute

// The pause between two questions is an eighth of the time waited so far, within these limits.
const (
	often  = 20 * time.Millisecond
	seldom = 250 * time.Millisecond
	share  = 8
)

// NoError waits until check returns nil. It fails the test with check's last error after [Patience].
func NoError(t testing.TB, what string, check func() error) {
	t.Helper()
	if err := Poll(t.Context(), Patience, check); err != nil {
		t.Fatalf("waited %s for: %s: %v", Patience, what, err)
	}
}

// True waits until done returns true. It fails the test after [Patience].
func True(t testing.TB, what string, done func() bool) {
	t.Helper()
	NoError(t, what, func() error {
		if !done() {
			return errors.New("not yet")
		}
		return nil
	})
}

// Poll calls check until it returns nil, ctx ends or limit has passed, and returns its last result.
func Poll(ctx context.Context, limit time.Duration, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for began := time.Now(); ; {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause(time.Since(began))):
		}
	}
}

// pause returns how long to wait after a question, given the time since the first one.
func pause(waited time.Duration) time.Duration { return min(max(often, waited/share), seldom) }
