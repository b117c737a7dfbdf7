package broker

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/go-logr/logr"
)

func TestStopFilterDropsTheLossOfTheLeaseAtStop(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		err     error
		message string
		logged  bool
	}{
		"the leader stops":      {errors.New(stopError), stopMessage, false},
		"another error at stop": {errors.New("timeout"), stopMessage, true},
		"a lost Lease":          {errors.New(stopError), "problem", true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			handler := slog.New(slog.NewTextHandler(&out, nil)).With("cluster", "a").Handler()
			logr.FromSlogHandler(stopFilter{handler}).WithValues("k", "v").Error(tt.err, tt.message)
			if logged := strings.Contains(out.String(), tt.message); logged != tt.logged {
				t.Errorf("the log is %q", out.String())
			}
		})
	}
}
