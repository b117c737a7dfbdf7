package datapath

import (
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
)

func TestEveryTableIsBoundToMap(t *testing.T) {
	spec, err := bpf.LoadSpec()
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range lb.Steps() {
		if !slices.ContainsFunc(tables, func(b binding) bool { return b.name() == step.Table }) {
			t.Errorf("table %s has no binding", step.Table)
		}
		if spec.Maps[step.Table] == nil {
			t.Errorf("table %s has no BPF map", step.Table)
		}
	}
	if have, want := 2*len(tables), len(lb.Steps()); have != want {
		t.Errorf("bindings for %d steps, want %d", have, want)
	}
}
