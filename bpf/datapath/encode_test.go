package datapath

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Every entry is passed once, whatever the number of chunks.
func TestInChunks(t *testing.T) {
	for _, n := range []int{0, 1, chunk - 1, chunk, chunk + 1, 5*chunk + 7} {
		entries := make([]int, n)
		for i := range entries {
			entries[i] = i
		}
		var mu sync.Mutex
		seen := []int{}
		err := inChunks(t.Context(), entries, func(part []int) error {
			mu.Lock()
			defer mu.Unlock()
			if len(part) == 0 || len(part) > chunk {
				t.Errorf("%d entries: a part of %d", n, len(part))
			}
			seen = append(seen, part...)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(seen)
		if diff := cmp.Diff(entries, seen); diff != "" {
			t.Errorf("%d entries (-want +got):\n%s", n, diff)
		}
	}
}

// The first error is returned, and no chunk starts after it.
func TestInChunksStops(t *testing.T) {
	full := errors.New("full")
	var mu sync.Mutex
	calls := 0
	err := inChunks(t.Context(), make([]int, 1000*chunk), func([]int) error {
		mu.Lock()
		defer mu.Unlock()
		calls++
		return full
	})
	if !errors.Is(err, full) || calls > 100 {
		t.Errorf("%v after %d calls, want %v after as many as there are CPUs", err, calls, full)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := inChunks(ctx, make([]int, 3), func([]int) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
}
