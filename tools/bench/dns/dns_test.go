package dns

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

// The name server answers every kind of traffic correctly, and saves its zone. The test leaves out changes and CoreDNS, which need
// seconds and an API server; the benchmark itself checks those.
func TestServers(t *testing.T) {
	b := &bench{
		sizes: sizes{many: names.Set{Services: 150, Endpoints: 200}, phase: 200 * time.Millisecond}, rounds: 1, progress: t.Output(), dir: t.TempDir(),
	}
	var err error
	if b.cpus.server, b.cpus.client, err = outerCPUs(); err != nil { // answers are right on one CPU, too
		t.Fatal(err)
	}
	b.program = filepath.Join(b.dir, "nameserver")
	if err := build(t.Context(), ".", "github.com/isthmus-net/isthmus/tools/bench/dns/nameserver", b.program); err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]string{isthmus: "serve", goEcho: "echo"} {
		s, err := b.nameserver(t.Context(), name, b.cpus.server, "-mode", mode, "-services", fmt.Sprint(b.many.Services), "-endpoints", fmt.Sprint(b.many.Endpoints))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.await(t.Context(), b.last()); err != nil {
			t.Fatal(err)
		}
		kinds := []kind{{name: plainMany, questions: b.many.Plain()}}
		if name == isthmus {
			kinds = append(kinds, kind{name: mixed, questions: b.many.Mix()}, kind{name: largeUDP, questions: names.Large(60)}, kind{name: largeTCP, questions: names.Large(200), tcp: true})
		}
		for _, k := range kinds {
			c, err := newAsker(s.at, k.questions, name != goEcho)
			if err != nil {
				t.Fatal(err)
			}
			have, err := b.ask(t.Context(), k, s, c)
			if err != nil || have.answers == 0 || have.cpu <= 0 {
				t.Errorf("%s, %s: %d answers, cpu %s: %v", name, k.name, have.answers, have.cpu, err)
			}
			_ = c.close()
		}
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	}
	file := filepath.Join(b.dir, "zone")
	if err := b.keepZone(t.Context(), file); err != nil {
		t.Fatal(err)
	}
	if memory, err := b.keptMemory(t.Context(), file); err != nil || memory <= 0 {
		t.Errorf("memory %v: %v", memory, err)
	}
}

// The other servers are stopped during a server's turn; afterwards all run.
func TestTurns(t *testing.T) {
	all := map[string]*server{}
	for _, name := range []string{isthmus, goEcho} {
		s, err := start(context.WithoutCancel(t.Context()), name, netip.AddrPort{}, -1, "cat")
		if err != nil {
			t.Fatal(err)
		}
		s.attached = true
		t.Cleanup(func() {
			if err := s.stop(); err != nil {
				t.Error(err)
			}
		})
		all[name] = s
	}
	becomes := func(name string, stopped bool) bool { // a signal takes a moment
		for begin := time.Now(); time.Since(begin) < 30*time.Second; {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", all[name].cmd.Process.Pid))
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(stat), ") T ") == stopped {
				return true
			}
		}
		return false
	}
	for _, running := range []string{isthmus, goEcho, ""} {
		if err := letRun(all, func(name string) bool { return running == "" || name == running }); err != nil {
			t.Fatal(err)
		}
		for name := range all {
			if stopped := running != "" && name != running; !becomes(name, stopped) {
				t.Errorf("turn of %q: %s stopped: %v, want %v", running, name, !stopped, stopped)
			}
		}
	}
}

// A wrong answer ends the run: fast wrong answers must not count.
func TestWrongAnswersFail(t *testing.T) {
	b := names.Ask(names.Name(0), names.TypeA, false)
	q := names.Question{Wire: b, Rcode: names.NoError, Answers: 1}
	answer := slices.Clone(b)
	answer[2] |= 0x80
	answer[7] = 1
	if err := check(answer, &q); err != nil {
		t.Error(err)
	}
	for name, edit := range map[string]func([]byte){
		"a question": func(b []byte) { b[2] = 0 }, "another code": func(b []byte) { b[3] = names.NXDomain }, "no records": func(b []byte) { b[7] = 0 },
	} {
		wrong := slices.Clone(answer)
		edit(wrong)
		if check(wrong, &q) == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

// A phase without an answer, on a busy machine, is extended.
func TestPhaseWaitsForAnAnswer(t *testing.T) {
	const phase = 5 * time.Millisecond
	for _, tt := range []struct {
		since   time.Duration
		answers int
		want    bool
	}{{phase - 1, 1, true}, {phase, 1, false}, {phase, 0, true}, {phase + time.Second, 0, false}} {
		if have := (&tally{answers: tt.answers}).goesOn(tt.since, phase); have != tt.want {
			t.Errorf("%d answers after %s: goes on %v, want %v", tt.answers, tt.since, have, tt.want)
		}
	}
}

// Every bar of the table has its row and its comparison.
func TestRows(t *testing.T) {
	b := &bench{samples: map[string]map[string][]sample{}}
	for _, kind := range []string{plainSome, plainMany, mixed, largeUDP, largeTCP} {
		b.samples[kind] = map[string][]sample{
			isthmus: {{cpu: 2, rate: 400, p99: 5}}, coreDNS: {{cpu: 20, rate: 40, p99: 500}}, goEcho: {{cpu: 1, rate: 500, p99: 4}},
		}
	}
	bars := map[string]float64{}
	for _, r := range append(b.trafficRows(), sizeRows(size{changes: []time.Duration{1}, peerChanges: []time.Duration{1}, restarts: []time.Duration{1}})...) {
		if r.Bar != nil {
			bars[r.Name] = r.Value
		}
		if r.Better != metric.Lower && r.Better != metric.Higher {
			t.Errorf("%s: better is %q", r.Name, r.Better)
		}
	}
	for name, want := range map[string]float64{
		"10,000 names, A: CPU per query / CoreDNS": 0.1, "10,000 names, A: queries / Go UDP echo": 0.8, "100,000 names, A: queries / CoreDNS": 10,
	} {
		if have, ok := bars[name]; !ok || have != want {
			t.Errorf("%s: have %v, want %v of %v", name, have, want, bars)
		}
	}
	if len(bars) != 9 {
		t.Errorf("%d bars, want 9: %v", len(bars), bars)
	}
}
