package quota

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func service(n int) clusterset.ServiceName {
	return clusterset.ServiceName{Namespace: "shop", Name: fmt.Sprintf("web-%03d", n)}
}

// record returns the record of Service n that the broker created at second age.
func record(n, age, ports int) Record {
	return Record{Service: service(n), Created: time.Unix(int64(age), 0), Ports: ports, Bytes: 10, Labels: 5}
}

func slice(n, of, age, endpoints int) Slice {
	return Slice{Name: fmt.Sprintf("slice-%03d", n), Service: service(of), Created: time.Unix(int64(age), 0), Endpoints: endpoints, Bytes: 3}
}

func admitted(v Verdict) []string {
	var all []string
	for n := range v.Records {
		all = append(all, n.Name)
	}
	for n := range v.Slices {
		all = append(all, n)
	}
	slices.Sort(all)
	return all
}

func TestJudge(t *testing.T) {
	unlimited := Amounts{Services: 100, Ports: 1000, PortsPerService: 100, Slices: 100, Endpoints: 1000, MetadataBytes: 10_000}
	with := func(edit func(*Amounts)) Amounts {
		l := unlimited
		edit(&l)
		return l
	}
	records := []Record{record(3, 30, 10), record(1, 10, 10), record(2, 10, 10)}
	all := []Slice{slice(1, 1, 5, 10), slice(2, 2, 40, 10), slice(3, 3, 30, 10), slice(4, 9, 1, 10)}
	for name, tc := range map[string]struct {
		limits  Amounts
		want    []string
		waiting map[Kind]int
	}{
		"everything with a record fits": {unlimited, []string{"slice-001", "slice-002", "slice-003", "web-001", "web-002", "web-003"}, map[Kind]int{}},
		"the youngest record waits, and its slice with it": {
			with(func(l *Amounts) { l.Services = 2 }), []string{"slice-001", "slice-002", "web-001", "web-002"}, map[Kind]int{Services: 1},
		},
		"of equally old records the last by name waits": {
			with(func(l *Amounts) { l.Ports = 10 }), []string{"slice-001", "web-001"}, map[Kind]int{Ports: 2},
		},
		"the youngest slice waits": {
			with(func(l *Amounts) { l.Slices = 2 }), []string{"slice-001", "slice-003", "web-001", "web-002", "web-003"}, map[Kind]int{Slices: 1},
		},
		"endpoints": {
			with(func(l *Amounts) { l.Endpoints = 29 }), []string{"slice-001", "slice-003", "web-001", "web-002", "web-003"}, map[Kind]int{Endpoints: 1},
		},
		"a slice costs the labels of its Service": {
			with(func(l *Amounts) { l.MetadataBytes = 30 + 2*8 }), []string{"slice-001", "slice-003", "web-001", "web-002", "web-003"}, map[Kind]int{MetadataBytes: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := Judge(tc.limits, records, all)
			if diff := gocmp.Diff(tc.want, admitted(v)); diff != "" {
				t.Errorf("admitted (-want +got):\n%s", diff)
			}
			if diff := gocmp.Diff(tc.waiting, v.Waiting); diff != "" {
				t.Errorf("waiting (-want +got):\n%s", diff)
			}
		})
	}
}

// A record with too many ports waits alone, and uses nothing.
func TestJudgeOneLargeRecord(t *testing.T) {
	limits := Defaults()
	limits.PortsPerService, limits.Ports = 10, 20
	v := Judge(limits, []Record{record(1, 1, 11), record(2, 2, 10), record(3, 3, 10)}, nil)
	if got := admitted(v); !slices.Equal(got, []string{"web-002", "web-003"}) || v.Waiting[PortsPerService] != 1 || v.Used.Ports != 20 {
		t.Errorf("admitted %v, waiting %v, used %+v", got, v.Waiting, v.Used)
	}
}

// Whatever the objects: the order in which they are read does not matter, no limit is exceeded, no object waits while a
// younger one is admitted, and what is admitted stays so when another object goes or shrinks.
func TestJudgeProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := func(most int) int { return rapid.IntRange(0, most).Draw(t, "size") }
		limits := Amounts{Services: size(8), Ports: size(40), PortsPerService: 8, Slices: size(8), Endpoints: size(40), MetadataBytes: size(300)}
		var records []Record
		var all []Slice
		for n := range size(12) {
			records = append(records, record(n, size(5), size(9)))
		}
		for n := range size(12) {
			all = append(all, slice(n, size(12), size(5), size(9)))
		}
		v := Judge(limits, records, all)
		if k := v.Used.Exceeds(limits, 1); k != "" {
			t.Fatalf("more than the limit of %s is used: %+v of %+v", k, v.Used, limits)
		}
		shuffled, shuffledSlices := slices.Clone(records), slices.Clone(all)
		rand.Shuffle(len(records), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		rand.Shuffle(len(all), func(i, j int) { shuffledSlices[i], shuffledSlices[j] = shuffledSlices[j], shuffledSlices[i] })
		if diff := gocmp.Diff(v, Judge(limits, shuffled, shuffledSlices)); diff != "" {
			t.Fatalf("the order matters: %s", diff)
		}
		if len(records) == 0 {
			return
		}
		i := rapid.IntRange(0, len(records)-1).Draw(t, "changed")
		changed := slices.Clone(records)
		if changed[i].Ports > limits.PortsPerService {
			return // it takes its place by age as soon as it is small enough
		}
		if changed[i].Ports /= 2; rapid.Bool().Draw(t, "gone") {
			changed = slices.Delete(changed, i, i+1)
		}
		after := Judge(limits, changed, nil)
		for n := range Judge(limits, records, nil).Records {
			if _, ok := after.Records[n]; !ok && n != records[i].Service {
				t.Fatalf("%s is evicted because %s shrank or went", n, records[i].Service)
			}
		}
	})
}

// The defaults stand for every limit that a ClusterSetConfig does not set.
func TestLimits(t *testing.T) {
	if got := Limits(nil); got != Defaults() {
		t.Errorf("without quotas the limits are %+v", got)
	}
	want := Defaults()
	want.Slices = 7
	if got := Limits(&v1alpha1.Quotas{Slices: 7}); got != want {
		t.Errorf("limits %+v, want %+v", got, want)
	}
}
