package bystanders

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/hostile"
)

const (
	seedVariable   = "ISTHMUS_HOSTILE_SEED"
	replayVariable = "ISTHMUS_HOSTILE_REPLAY"

	// perRound is how many draws, of about two objects each, are applied beside one change of the bystanders.
	perRound = 20
	// heapLimit is how much the heap of all controllers and agents, which run in this process, may grow. Each of some fifty watches
	// keeps two buffers of the size of its largest event, and maps keep the room for the most that they have held: 30 MiB after
	// 1,500 objects, 66 MiB after 10,000.
	heapLimit = 128 << 20
	// shrinkLimit is how long the search for a smaller failure may take.
	shrinkLimit = 3 * time.Minute
)

// fullLength reports whether the test applies 10,000 objects instead of 300.
func fullLength() bool { return os.Getenv("ISTHMUS_FULL_LENGTH") != "" }

// Hostile objects of tenants and of a member do not harm the bystanders: their changes arrive everywhere and in time, their
// connections succeed, nodes serve no address and no endpoint beyond what its author may name, and nothing grows.
func TestBystanders(t *testing.T) {
	w := newTestbed(t)
	w.create(w.cluster("west"), foreignImport())
	w.addBystanders()
	w.connect()
	w.measureBaseline()
	w.t.Logf("a change without hostile objects takes up to %s", w.baseline)
	var err error
	w.counts, err = w.size(t.Context())
	w.noError(err)
	w.scene = w.newScene()
	heap := heapInUse()
	if replay := os.Getenv(replayVariable); replay != "" {
		w.replay(replay)
		return
	}
	w.within(t, "known attacks", w.knownAttacks)
	w.within(t, "drawn objects", w.drawnObjects)
	w.within(t, "nothing grows", func() { w.nothingGrows(heap) })
}

// within runs part as a subtest. The testbed lives on.
func (w *testbed) within(t *testing.T, name string, part func()) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		was := w.t
		w.t = t
		defer func() { w.t = was }()
		part()
	})
}

func (w *testbed) newScene() hostile.Scene {
	s := hostile.Scene{
		Tenants: tenants, Next: newcomer(w.round + 1), Member: crook, Broker: brokerNamespace, Namespace: shop, Services: []string{foreign},
		Pods: map[string][]netip.Prefix{}, Block: netip.MustParsePrefix(fmt.Sprintf("243.%d.0.0/16", numbers[crook])),
		Foreign: append([]netip.Addr{netip.MustParseAddr("10.101.0.77")}, protected...), Now: time.Now().UTC().Truncate(time.Second),
	}
	for _, c := range w.clusters {
		s.Others = append(s.Others, c.id)
	}
	for id := range numbers {
		s.Pods[id] = pods(id)
	}
	for _, b := range w.bystanders {
		if b.elder {
			s.Exported = append(s.Exported, b.name)
			continue
		}
		s.Services = append(s.Services, b.name)
		s.Foreign = append(s.Foreign, b.vips...)
	}
	return s
}

// knownAttacks tries all attacks: those that must do no harm together where they can be, the others alone.
func (w *testbed) knownAttacks() {
	var together [][]attack
	for _, a := range attacks {
		if finding, known := notHeldYet[a.name]; known {
			w.notHeld(a, finding)
			continue
		}
		i := slices.IndexFunc(together, func(group []attack) bool { return !slices.ContainsFunc(group, a.collides(w)) })
		if i < 0 {
			i, together = len(together), append(together, nil)
		}
		together[i] = append(together[i], a)
	}
	for _, group := range together {
		together := w.attack(group...)
		if together == nil {
			continue
		}
		w.t.Logf("%d attacks together: %v", len(group), together)
		failed := false
		for _, a := range group { // which one; what was told once is not told again
			if harm := w.trial(w.objectsOf(a), nil); harm != nil {
				w.t.Errorf("%s: %v", a.name, harm)
				failed = true
			}
		}
		if !failed {
			w.t.Errorf("attacks fail together, and none of them does harm alone: %v", together)
		}
	}
}

// collides reports whether another attack writes an object that a writes.
func (a attack) collides(w *testbed) func(attack) bool {
	return func(b attack) bool {
		for _, x := range a.objects(w) {
			for _, y := range b.objects(w) {
				if keyOf(a.cluster, x) == keyOf(b.cluster, y) {
					return true
				}
			}
		}
		return false
	}
}

// attack returns the harm of attacks that are made together, or which of them is not told.
func (w *testbed) attack(together ...attack) error {
	return w.trial(w.objectsOf(together...), func(outcomes []outcome) error { return w.untold(together, outcomes) })
}

func (w *testbed) objectsOf(attacks ...attack) (objects []hostile.Object) {
	for _, a := range attacks {
		more, err := hostile.Objects(a.cluster, a.name, a.objects(w)...)
		w.noError(err)
		objects = append(objects, more...)
	}
	return objects
}

// notHeld checks that an attack still does the harm of a finding.
func (w *testbed) notHeld(a attack, finding string) {
	w.expectHarm = true
	defer func() { w.expectHarm = false }()
	if harm := w.attack(a); harm == nil {
		w.t.Errorf("%s: no harm is left of finding %s; remove it from notHeldYet", a.name, finding)
	} else {
		w.t.Logf("%s (%s): %v", a.name, finding, harm)
	}
}

func (w *testbed) generator() hostile.Generator {
	seed := uint64(1)
	if fullLength() {
		seed = rand.Uint64N(1_000_000)
	}
	if text := os.Getenv(seedVariable); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		w.noError(err)
	}
	return hostile.Generator{Kinds: hostile.Kinds(), Scene: w.scene, Seed: seed}
}

func (w *testbed) drawnObjects() {
	g, total := w.generator(), 300
	if fullLength() {
		total = 10_000
	}
	w.t.Logf("%s=%d", seedVariable, g.Seed)
	refused, applied, number, slowest := 0, 0, 0, time.Duration(0)
	for applied < total {
		var batch []hostile.Object
		for range perRound {
			g.Scene.Next = newcomer(w.round + 1)
			objects, err := g.Draw(number)
			w.noError(err)
			batch = append(batch, objects...)
			number++
		}
		rand.New(rand.NewPCG(g.Seed, uint64(number))).Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
		began := time.Now()
		harm := w.trial(batch, func(outcomes []outcome) error {
			refused += countRefused(outcomes)
			return w.silent(outcomes)
		})
		slowest = max(slowest, time.Since(began))
		if applied += len(batch); applied/1000 > (applied-len(batch))/1000 {
			w.t.Logf("%d of %d objects", applied, total)
		}
		if harm != nil {
			w.t.Fatalf("hostile objects do harm: %v\n%s", harm, w.shrunk(batch))
		}
	}
	w.t.Logf("%d objects of %d draws, %d refused by an API server; the slowest round took %s", applied, number, refused, slowest)
}

func countRefused(outcomes []outcome) (n int) {
	for _, o := range outcomes {
		if o.refused != nil {
			n++
		}
	}
	return n
}

// shrunk describes the smallest part of objects that still does harm.
func (w *testbed) shrunk(objects []hostile.Object) string {
	small, last := hostile.Smallest(w.t.Context(), shrinkLimit, objects, func(try []hostile.Object) error { return w.trial(try, w.silent) })
	if last == nil {
		return "not again, in parts or as a whole:\n" + describe(objects)
	}
	return fmt.Sprintf("the smallest part that does harm: %v\n%s", last, describe(small))
}

// replay applies the objects whose origins text lists, together.
func (w *testbed) replay(text string) {
	var objects []hostile.Object
	for origin := range strings.SplitSeq(text, ",") {
		var seed uint64
		var number int
		if _, err := fmt.Sscanf(origin, "%d/%d", &seed, &number); err != nil {
			w.t.Fatalf("%s: %q is not SEED/NUMBER: %v", replayVariable, origin, err)
		}
		drawn, err := hostile.Generator{Kinds: hostile.Kinds(), Scene: w.scene, Seed: seed}.Draw(number)
		w.noError(err)
		objects = append(objects, drawn...)
	}
	w.t.Log(describe(objects))
	harm := w.trial(objects, func(outcomes []outcome) error {
		for _, o := range outcomes {
			w.t.Logf("%s: %v", o.Object, cmp.Or(o.refused, errAccepted))
		}
		return w.silent(outcomes)
	})
	if harm != nil {
		w.t.Errorf("hostile objects do harm: %v\n%s", harm, w.shrunk(objects))
	}
}

var errAccepted = errors.New("accepted")

// nothingGrows checks that the clusters, the broker and the heap are what they were before the first hostile object.
func (w *testbed) nothingGrows(heap uint64) {
	w.eventually("objects are left", func() error {
		have, err := w.size(w.t.Context())
		if err != nil {
			return err
		}
		for what, n := range have {
			if n > w.counts[what] {
				return fmt.Errorf("%s: %d objects are left, %d at the start", what, n, w.counts[what])
			}
		}
		return nil
	})
	have := heapInUse()
	w.t.Logf("heap: %d MiB at the start, %d MiB at the end", heap>>20, have>>20)
	if have > heap+heapLimit {
		w.t.Errorf("the heap grew from %d to %d MiB", heap>>20, have>>20)
	}
}

func heapInUse() uint64 {
	runtime.GC()
	runtime.GC() // finalizers of the first one free more
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
