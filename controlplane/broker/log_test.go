package broker

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/go-logr/logr"
)

func TestEndOfALeaderIsNoError(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		err     error
		message string
		said    bool
	}{
		"the leader ends":        {errors.New(partingError), partingMessage, false},
		"it ends in another way": {errors.New("timeout"), partingMessage, true},
		"it lost the Lease":      {errors.New(partingError), "problem", true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			handler := slog.New(slog.NewTextHandler(&out, nil)).With("cluster", "a").Handler()
			logr.FromSlogHandler(parting{handler}).WithValues("k", "v").Error(tt.err, tt.message)
			if said := strings.Contains(out.String(), tt.message); said != tt.said {
				t.Errorf("said %q", out.String())
			}
		})
	}
}
