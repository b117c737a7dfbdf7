package evidence

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// step is one evaluation of member b. Member a answers, unless aSilent is set.
type step struct {
	at               time.Duration
	answered, silent time.Duration // of b
	aSilent          time.Duration // of a
	probeFailed      time.Duration // a probe of b that began then
	probeAnswered    time.Duration
	want             string // drained members
	probe            string // members to probe
}

func TestDetector(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	tests := map[string][]step{
		"traffic flows": {
			{at: 10 * s, answered: 9 * s},
			{at: 20 * s, answered: 19 * s},
		},
		"nothing is known": {
			{at: 10 * s},
			{at: 100 * s},
		},
		"one packet is lost, the next one is not": {
			{at: 10 * s, answered: 9 * s, silent: 10 * s, probe: "b"},
			{at: 12 * s, answered: 11 * s, silent: 10 * s},
		},
		"neither packets nor probes get an answer": {
			{at: 10 * s, answered: 9 * s, silent: 10 * s, probe: "b"},
			{at: 10*s + 900*ms, answered: 9 * s, silent: 10 * s, probeFailed: 10 * s, probe: "b"},
			{at: 11 * s, answered: 9 * s, silent: 10 * s, want: "b", probe: "b"},
		},
		"no probe has ended yet": {{at: 10 * s, silent: 10 * s, probe: "b"}, {at: 20 * s, silent: 20 * s, probe: "b"}},
		"a probe that began before the silence does not count": {
			{at: 10 * s, silent: 10 * s, probe: "b"}, {at: 20 * s, silent: 20 * s, probeFailed: 9 * s, probe: "b"},
		},
		"a packet outweighs a failed probe": {
			{at: 10 * s, silent: 10 * s, probe: "b"},
			{at: 11 * s, silent: 10 * s, answered: 10*s + ms, probeFailed: 10 * s},
		},
		"a probe is answered, so only a backend is silent": {
			{at: 10 * s, silent: 10 * s, probe: "b"},
			{at: 12 * s, silent: 10 * s, probeAnswered: 10*s + ms},
			{at: 12 * s, silent: 12 * s, probe: "b"}, // the backend is silent again
			{at: 14 * s, silent: 12 * s, probeAnswered: 13 * s},
		},
		"a packet restores the member": {
			{at: 10 * s, silent: 10 * s, probe: "b"},
			{at: 11 * s, silent: 11 * s, probeFailed: 10 * s, want: "b", probe: "b"},
			{at: 12 * s, silent: 11 * s, answered: 11*s + 500*ms},
		},
		"a probe restores the member although a backend is silent": {
			{at: 10 * s, silent: 10 * s, probe: "b"},
			{at: 11 * s, silent: 11 * s, probeFailed: 10 * s, want: "b", probe: "b"},
			{at: 14 * s, silent: 13 * s, probeAnswered: 12 * s, probe: "b"},
		},
		"clients try again after 30 s if no probe was ever answered": {
			{at: 10 * s, silent: 10 * s, probe: "b"},
			{at: 11 * s, silent: 11 * s, probeFailed: 10 * s, want: "b", probe: "b"},
			{at: 40 * s, silent: 11 * s, want: "b", probe: "b"},
			{at: 41 * s, silent: 11 * s},
			{at: 43 * s, silent: 43 * s, probe: "b"},
			{at: 44 * s, silent: 43 * s, probeFailed: 43 * s, want: "b", probe: "b"},
		},
		"clients try again after 5 minutes if a probe was answered once": {
			{at: 5 * s, silent: 5 * s, probe: "b"},
			{at: 6 * s, silent: 5 * s, probeAnswered: 5 * s},
			{at: 10 * s, silent: 10 * s, probe: "b"},
			{at: 11 * s, silent: 11 * s, probeFailed: 10 * s, want: "b", probe: "b"},
			{at: 310 * s, silent: 11 * s, want: "b", probe: "b"},
			{at: 311 * s, silent: 11 * s},
		},
		"all members are silent": {
			{at: 10 * s, silent: 10 * s, probe: "b"},
			{at: 11 * s, silent: 11 * s, probeFailed: 10 * s, want: "b", probe: "b"},
			{at: 12 * s, silent: 11 * s, aSilent: 12 * s, want: "b", probe: "a b"},
			{at: 13 * s, silent: 11 * s, aSilent: 12 * s, probeFailed: -1, probe: "a b"},
			{at: 14 * s, silent: 11 * s, aSilent: 12 * s, probe: "a b"},
		},
	}
	for name, steps := range tests {
		t.Run(name, func(t *testing.T) {
			var d Detector
			for _, step := range steps {
				switch {
				case step.probeFailed == -1:
					d.ProbeResult("a", step.at, false)
				case step.probeFailed > 0:
					d.ProbeResult("b", step.probeFailed, false)
				case step.probeAnswered > 0:
					d.ProbeResult("b", step.probeAnswered, true)
				}
				drained, changes, probe := d.Evaluate(step.at, map[cs.ClusterID]datapath.Evidence{
					"a": {AnsweredAt: time.Second, SilentAt: step.aSilent},
					"b": {AnsweredAt: step.answered, SilentAt: step.silent},
				})
				if diff := cmp.Diff([]string{step.want, step.probe}, []string{list(drained), ids(probe)}); diff != "" {
					t.Errorf("at %s, drained and probed members (-want +got):\n%s", step.at, diff)
				}
				for _, c := range changes {
					if c.Reason == "" || c.Drained != drained[c.Cluster] {
						t.Errorf("at %s: change %+v", step.at, c)
					}
				}
			}
		})
	}
}

func list(drained map[cs.ClusterID]bool) string {
	var l []cs.ClusterID
	for _, id := range []cs.ClusterID{"a", "b", "c"} {
		if drained[id] {
			l = append(l, id)
		}
	}
	return ids(l)
}

func ids(l []cs.ClusterID) string {
	text := ""
	for i, id := range l {
		if i > 0 {
			text += " "
		}
		text += string(id)
	}
	return text
}

// In every history: not all members are drained, the changes add up to the decision, and a member that has just
// answered is not drained.
func TestDetectorProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var d Detector
		now := time.Second
		all := []cs.ClusterID{"a", "b", "c"}[:rapid.IntRange(1, 3).Draw(t, "members")]
		seen := map[cs.ClusterID]datapath.Evidence{}
		for _, id := range all {
			seen[id] = datapath.Evidence{}
		}
		have := map[cs.ClusterID]bool{}
		var probed []cs.ClusterID
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			now += time.Duration(rapid.IntRange(1, 2000).Draw(t, "ms")) * time.Millisecond
			id := rapid.SampledFrom(all).Draw(t, "member")
			e := seen[id]
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				e.AnsweredAt = now
			case 1:
				e.SilentAt = now
			case 2:
				for _, id := range probed {
					d.ProbeResult(id, now-time.Millisecond, rapid.Bool().Draw(t, "answered"))
				}
			}
			seen[id] = e
			drained, changes, probe := d.Evaluate(now, seen)
			probed = probe
			for _, c := range changes {
				if have[c.Cluster] == c.Drained {
					t.Fatalf("change %+v changes nothing", c)
				}
				have[c.Cluster] = c.Drained
			}
			if len(drained) == len(seen) {
				t.Fatal("all members are drained")
			}
			for _, id := range all {
				if have[id] != drained[id] {
					t.Fatalf("%s: changes say %v, the decision is %v", id, have[id], drained[id])
				}
				if drained[id] && seen[id].AnsweredAt == now {
					t.Fatalf("%s is drained and has just answered", id)
				}
			}
		}
	})
}
