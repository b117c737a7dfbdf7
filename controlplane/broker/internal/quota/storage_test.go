package quota

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// stored returns the object n of a class that the broker created at second age.
func stored(class Class, n, age int, uses Stored) Object {
	return Object{Class: class, Name: fmt.Sprintf("object-%03d", n), Created: time.Unix(int64(age), 0), Uses: uses}
}

// excess returns the names of the objects in excess.
func excess(limits Stored, all []Object) []string {
	var names []string
	for _, i := range Excess(limits, all) {
		names = append(names, all[i].Name)
	}
	return names
}

func TestStorageLimits(t *testing.T) {
	limits := StorageLimits(&v1alpha1.Quotas{Services: 5, StorageBytes: 1 << 20})
	if limits.Services != 5 || limits.Tombstones != 5 || limits.Aggregates != 5 || limits.StorageBytes != 1<<20 || limits.Slices != Defaults().Slices {
		t.Errorf("limits: %+v", limits)
	}
	if limits := StorageLimits(nil); limits.StorageBytes != 256<<20 || limits.Tombstones != Defaults().Services {
		t.Errorf("defaults: %+v", limits)
	}
}

// The broker's refusal is recognized within other errors, and other errors stay as they are.
func TestWithRefusal(t *testing.T) {
	if err := WithRefusal(nil, true); err != nil {
		t.Errorf("nil became %v", err)
	}
	other := errors.New("forbidden")
	if err := WithRefusal(other, true); !errors.Is(err, other) || errors.As(err, new(*Refusal)) {
		t.Errorf("%v became %v", other, err)
	}
	refused := errors.Join(other, errors.New("create slice: denied request: QuotaExceeded: member a has 2 slices of at most 1"), other)
	err := WithRefusal(refused, false)
	if r := (*Refusal)(nil); !errors.As(err, &r) || r.Reason != "member a has 2 slices of at most 1" || r.Unpublished || !errors.Is(err, other) {
		t.Errorf("%v became %+v", refused, err)
	}
}

func TestOver(t *testing.T) {
	limits := Stored{Amounts: Amounts{Services: 2, Slices: 4, PortsPerService: 1}, Tombstones: 2}
	used := Stored{Amounts: Amounts{Services: 3, Slices: 4, PortsPerService: 9}, Tombstones: 5}
	if diff := gocmp.Diff([]Kind{Services, Tombstones}, used.Over(limits, 1)); diff != "" {
		t.Errorf("over the limits (-want +got):\n%s", diff)
	}
	if diff := gocmp.Diff([]Kind{Tombstones}, used.Over(limits, 2)); diff != "" {
		t.Errorf("over twice the limits (-want +got):\n%s", diff)
	}
}

func TestExcess(t *testing.T) {
	limits := StorageLimits(&v1alpha1.Quotas{Services: 2, Slices: 2, Ports: 10, StorageBytes: 1 << 20})
	record := func(n, age int) Object {
		return stored(RecordClass, n, age, Stored{Amounts: Amounts{Services: 1, Ports: 1}, StorageBytes: 1000})
	}
	admitted := func(o Object) Object {
		o.Admitted = true
		return o
	}
	for name, tc := range map[string]struct {
		objects []Object
		want    []string
	}{
		"twice the quota stays": {[]Object{admitted(record(1, 1)), admitted(record(2, 2)), record(3, 3), record(4, 4)}, nil},
		"the youngest go, in any order of arrival": {
			[]Object{record(6, 6), record(4, 4), record(5, 5), admitted(record(1, 1)), record(3, 3), admitted(record(2, 2))}, []string{"object-006", "object-005"},
		},
		"of equally old objects the last by name goes": {[]Object{record(5, 1), record(1, 1), record(4, 1), record(3, 1), record(2, 1)}, []string{"object-005"}},
		"admitted objects stay, however young": {
			[]Object{record(1, 1), record(2, 2), record(3, 3), record(4, 4), admitted(record(5, 5)), admitted(record(6, 6))}, []string{"object-004", "object-003"},
		},
		"all behind one that does not fit": {
			[]Object{stored(RecordClass, 1, 1, Stored{Amounts: Amounts{Services: 1, Ports: 21}}), record(2, 2)}, []string{"object-002", "object-001"},
		},
		"many slices cost no record": {
			[]Object{
				stored(SliceClass, 1, 1, Stored{Amounts: Amounts{Slices: 5}}), record(2, 2),
				stored(TombstoneClass, 3, 3, Stored{Tombstones: 1}), stored(AggregateClass, 4, 4, Stored{Aggregates: 1}),
			},
			[]string{"object-001"},
		},
		"tombstones and aggregates count for themselves": {
			slices.Concat(
				[]Object{record(90, 1), record(91, 1), record(92, 1), record(93, 1)},
				tenOf(TombstoneClass, 0, Stored{Tombstones: 1})[:5], tenOf(AggregateClass, 10, Stored{Aggregates: 1})[:5]),
			[]string{"object-014", "object-004"},
		},
		"the bytes of everything": {
			[]Object{record(1, 1), stored(SliceClass, 2, 2, Stored{Amounts: Amounts{Slices: 1}, StorageBytes: 2 << 20}), stored(TombstoneClass, 3, 3, Stored{Tombstones: 1, StorageBytes: 1})},
			[]string{"object-002"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := gocmp.Diff(tc.want, excess(limits, tc.objects)); diff != "" {
				t.Errorf("excess (-want +got):\n%s", diff)
			}
		})
	}
}

func tenOf(class Class, from int, uses Stored) []Object {
	var all []Object
	for n := range 10 {
		all = append(all, stored(class, from+n, from+n, uses))
	}
	return all
}

// The objects that stay take at most StorageFactor times the quota, and the result does not depend on the order of the objects.
func TestExcessProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := StorageLimits(&v1alpha1.Quotas{Services: 3, Slices: 3, Ports: 9, Endpoints: 9, MetadataBytes: 100, StorageBytes: 1000})
		var all []Object
		for n := range rapid.IntRange(0, 40).Draw(t, "objects") {
			class := Class(rapid.IntRange(0, int(classes)-1).Draw(t, "class"))
			uses := Stored{StorageBytes: rapid.IntRange(1, 300).Draw(t, "bytes")}
			switch class {
			case RecordClass:
				uses.Amounts = Amounts{Services: 1, Ports: rapid.IntRange(0, 5).Draw(t, "ports")}
			case SliceClass:
				uses.Amounts = Amounts{Slices: 1, Endpoints: rapid.IntRange(0, 5).Draw(t, "endpoints")}
			case TombstoneClass:
				uses.Tombstones = 1
			case AggregateClass:
				uses = Stored{Aggregates: 1}
			case classes: // none
			}
			all = append(all, stored(class, n, rapid.IntRange(0, 9).Draw(t, "age"), uses))
		}
		names := excess(limits, all)
		gone := map[string]bool{}
		for _, name := range names {
			gone[name] = true
		}
		var left Stored
		for _, o := range all {
			if !gone[o.Name] {
				left = left.Plus(o.Uses)
			}
		}
		if over := left.Over(limits, StorageFactor); len(over) > 0 {
			t.Fatalf("what stays exceeds %v: %+v", over, left)
		}
		slices.Reverse(all)
		if diff := gocmp.Diff(names, excess(limits, all)); diff != "" {
			t.Fatalf("another order (-first +second):\n%s", diff)
		}
	})
}
