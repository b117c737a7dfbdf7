package await

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, asked := time.Now(), 0
		NoError(t, "a minute has passed", func() error {
			asked++
			if time.Since(began) < time.Minute {
				return errors.New("too early")
			}
			return nil
		})
		if took := time.Since(began); took > time.Minute+seldom {
			t.Errorf("it took %s", took)
		}
		if asked < 4*60 || asked > 4*60+50 {
			t.Errorf("asked %d times", asked)
		}
	})
}

func TestPollEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		last := errors.New("not so")
		if err := Poll(t.Context(), time.Minute, func() error { return last }); !errors.Is(err, last) {
			t.Errorf("after the limit: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := Poll(ctx, time.Minute, func() error { return last }); !errors.Is(err, last) {
			t.Errorf("after the end of the context: %v", err)
		}
	})
}
