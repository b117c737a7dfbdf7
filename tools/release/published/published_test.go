package published

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/version"
)

// The list is in order, and a version that is in it cannot be built of another commit.
func TestReleases(t *testing.T) {
	t.Parallel()
	all, err := Releases()
	if err != nil || len(all) == 0 {
		t.Fatal(all, err)
	}
	if !slices.IsSortedFunc(all, func(a, b Release) int {
		return -compare(t, a.Version, b.Version)
	}) {
		t.Errorf("not the newest first: %v", all)
	}
	if err := Check(all[0].Version, all[0].Commit); err != nil {
		t.Error(err)
	}
	if err := Check("v99.0.0", all[0].Commit); err != nil {
		t.Error(err)
	}
	if err := Check(all[0].Version, strings.Repeat("0", 40)); err == nil || !strings.Contains(err.Error(), all[0].Commit) {
		t.Errorf("another commit: %v", err)
	}
}

func compare(t *testing.T, a, b string) int {
	t.Helper()
	v, err := version.ParseSemantic(a)
	if err != nil {
		t.Fatal(err)
	}
	c, err := v.Compare(b)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
