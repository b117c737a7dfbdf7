package slicesync_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/internal/kube/slicesync"
)

var errRefused = errors.New("refused")

// slice returns a slice from "NAME CONTENT".
func slice(text string) *discoveryv1.EndpointSlice {
	name, content, _ := strings.Cut(text, " ")
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name}, AddressType: discoveryv1.AddressType(content)}
}

func TestRun(t *testing.T) {
	for name, test := range map[string]struct {
		existing, wanted, keep, withdrawn []string
		refuse                            string
		writes                            []string
	}{
		"nothing":                        {},
		"no difference":                  {existing: []string{"a 1", "b 2"}, wanted: []string{"b 2", "a 1"}},
		"only the changed one":           {existing: []string{"a 1", "b 2"}, wanted: []string{"a 1", "b 3"}, writes: []string{"update b 3"}},
		"new before old":                 {existing: []string{"a 1"}, wanted: []string{"b 1"}, writes: []string{"create b 1", "delete a"}},
		"deletes in the given order":     {existing: []string{"c 1", "a 1", "b 1"}, writes: []string{"delete c", "delete a", "delete b"}},
		"keeps what is not wanted":       {existing: []string{"a 1", "b 1"}, keep: []string{"b"}, writes: []string{"delete a"}},
		"updates a kept one":             {existing: []string{"a 1"}, wanted: []string{"a 2"}, keep: []string{"a"}, writes: []string{"update a 2"}},
		"withdrawn before new":           {existing: []string{"a 1", "b 1"}, wanted: []string{"c 1"}, withdrawn: []string{"b"}, writes: []string{"delete b", "create c 1", "delete a"}},
		"keeps a withdrawn one":          {existing: []string{"a 1"}, withdrawn: []string{"a"}, keep: []string{"a"}},
		"a refused write stops no other": {existing: []string{"a 1", "x 1"}, wanted: []string{"b 1", "c 1", "x 2"}, refuse: "create b 1", writes: []string{"create c 1", "update x 2", "delete a"}},
		"a failed deletion stops none":   {existing: []string{"a 1", "b 1", "c 1"}, refuse: "delete b", writes: []string{"delete a", "delete c"}},
		"nor does one of a withdrawn":    {existing: []string{"a 1", "b 1"}, wanted: []string{"c 1"}, withdrawn: []string{"a", "b"}, refuse: "delete a", writes: []string{"delete b", "create c 1"}},
		"a refused write counts as none": {wanted: []string{"a 1"}, refuse: "create a 1"},
	} {
		t.Run(name, func(t *testing.T) {
			var writes []string
			write := func(format string, args ...any) error {
				w := fmt.Sprintf(format, args...)
				if w == test.refuse {
					return errRefused
				}
				writes = append(writes, w)
				return nil
			}
			var wanted []*discoveryv1.EndpointSlice
			for _, w := range test.wanted {
				wanted = append(wanted, slice(w))
			}
			put := func(verb string) func(context.Context, *discoveryv1.EndpointSlice) error {
				return func(_ context.Context, es *discoveryv1.EndpointSlice) error {
					return write("%s %s %s", verb, es.Name, es.AddressType)
				}
			}
			sync := slicesync.Sync[string]{
				Existing: test.existing, Wanted: slices.Values(wanted),
				Name:     func(e string) string { return slice(e).Name },
				UpToDate: func(e string, es *discoveryv1.EndpointSlice) bool { return slice(e).AddressType == es.AddressType },
				Create:   put("create"), Update: put("update"),
				Delete: func(_ context.Context, e string) error { return write("delete %s", slice(e).Name) },
			}
			if test.keep != nil {
				sync.Keep = func(e string) bool { return slices.Contains(test.keep, slice(e).Name) }
			}
			if test.withdrawn != nil {
				sync.Withdrawn = func(e string) bool { return slices.Contains(test.withdrawn, slice(e).Name) }
			}
			wrote, err := sync.Run(t.Context())
			if errors.Is(err, errRefused) != (test.refuse != "") {
				t.Errorf("the error is %v", err)
			}
			if wrote != (len(writes) > 0) {
				t.Errorf("Run reports %t after %d writes", wrote, len(writes))
			}
			if diff := cmp.Diff(test.writes, writes); diff != "" {
				t.Errorf("writes (-want +have):\n%s", diff)
			}
		})
	}
}

// The API server refuses a thousand slices. The error names some of them and the number of the others.
func TestManyErrorsStayShort(t *testing.T) {
	var existing []string
	for i := range 1000 {
		existing = append(existing, fmt.Sprintf("web-%d 1", i))
	}
	_, err := slicesync.Sync[string]{
		Existing: existing, Wanted: slices.Values([]*discoveryv1.EndpointSlice{}),
		Name:   func(e string) string { return slice(e).Name },
		Delete: func(context.Context, string) error { return errRefused },
	}.Run(t.Context())
	if !errors.Is(err, errRefused) || len(err.Error()) > 500 || !strings.Contains(err.Error(), "and 995 more slices") {
		t.Errorf("the error is %v", err)
	}
}
