package memory

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/controlplane/federation/part"
)

// As many kinds as there are places are read whole at a time. One that was waited for long enough holds nobody up.
func TestKindsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		outside := reading
		reading = make(chan struct{}, 2)
		defer func() { reading = outside }()
		var kinds []*Kind
		for range 4 {
			kinds = append(kinds, newKind(corev1.SchemeGroupVersion.WithKind("Service"), part.Watch{Object: &corev1.Service{}}, nil))
		}
		took := func(ctx context.Context, k *Kind) time.Duration {
			begin := time.Now()
			k.begin(ctx)
			return time.Since(begin)
		}
		for _, k := range []*Kind{kinds[0], kinds[1], kinds[1]} {
			if d := took(t.Context(), k); d != 0 || !k.hasTurn() {
				t.Fatalf("with a place free, or as one that has one, a kind waits %v", d)
			}
		}
		go func() {
			<-time.After(time.Second)
			_ = kinds[0].Replace(nil, "")
		}()
		if d := took(t.Context(), kinds[2]); d != time.Second || !kinds[2].hasTurn() {
			t.Errorf("a kind waits %v until another one was read, want 1s", d)
		}
		if d := took(t.Context(), kinds[3]); d != longest || kinds[3].hasTurn() {
			t.Errorf("a kind waits %v for others that are never read, want %v, and no place", d, longest)
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		kinds[1].end()
		for range 20 {
			if took(gone, kinds[3]); kinds[3].hasTurn() {
				t.Fatal("whoever is gone has a place")
			}
		}
		kinds[2].end()
		kinds[3].end()
		if n := len(reading); n != 0 {
			t.Errorf("%d places are taken in the end", n)
		}
	})
}
