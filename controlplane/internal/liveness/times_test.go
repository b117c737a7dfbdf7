package liveness

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
)

func TestDefaultTimes(t *testing.T) {
	for _, factor := range []float64{1, 0.01, 100} {
		if err := DefaultTimes().Scale(timescale.Factor(factor)).Validate(); err != nil {
			t.Errorf("the defaults times %v: %v", factor, err)
		}
	}
	if have, want := DefaultTimes().Scale(0.1).HardTTL, 30*time.Second; have != want {
		t.Errorf("a tenth of the hard TTL is %v, want %v", have, want)
	}
}

func TestTimesRefuse(t *testing.T) {
	for name, change := range map[string]func(*Times){
		"renew":      func(t *Times) { t.Renew = 0 },
		"stale":      func(t *Times) { t.Stale = 3*t.Renew - 1 },
		"probe 0s":   func(t *Times) { t.Probe = 0 },
		"a probe":    func(t *Times) { t.Probe = t.ProbeEvery + 1 },
		"hard TTL":   func(t *Times) { t.HardTTL = t.Stale - 1; t.Damping = 0 },
		"frozen":     func(t *Times) { t.Frozen = t.HardTTL - 1 },
		"damping -":  func(t *Times) { t.Damping = -1 },
		"damping 5m": func(t *Times) { t.Damping = t.HardTTL + 1 },
	} {
		t.Run(name, func(t *testing.T) {
			times := DefaultTimes()
			change(&times)
			err := fmt.Sprint(times.Validate())
			if !strings.HasPrefix(err, "liveness times: "+name) || strings.Contains(err, "\n") {
				t.Errorf("have %q, want one fault of %s", err, name)
			}
		})
	}
	if n := strings.Count(fmt.Sprint(Times{Damping: -1, HardTTL: -1, Frozen: -2, Stale: -1}.Validate()), "\n") + 1; n < 5 {
		t.Errorf("the error names only %d faults", n)
	}
}

func TestStatesHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for s := Live; s <= Dead; s++ {
		seen[s.String()] = true
	}
	for v := Unknown; v <= Silent; v++ {
		seen[v.String()] = true
	}
	if len(seen) != 7 || seen[""] {
		t.Errorf("the names of states and verdicts are %v", seen)
	}
	var zero Verdict
	if zero != Unknown {
		t.Errorf("the zero verdict is %v", zero)
	}
}
