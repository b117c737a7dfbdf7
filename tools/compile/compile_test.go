package compile_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/compile"
)

// make and the programs that compile for themselves use the same flags, or everything would be compiled twice.
func TestFlagsAreTheMakefiles(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	if want := "export GOFLAGS = " + compile.Flags; !slices.Contains(strings.Split(string(makefile), "\n"), want) {
		t.Errorf("the Makefile has no line %q", want)
	}
}

// A program that is run with further flags compiles with them, as one image of another source needs it.
func TestFurtherFlags(t *testing.T) {
	for set, want := range map[string]string{"": compile.Flags, "-race": compile.Flags, compile.Flags + " -overlay=x": compile.Flags + " -overlay=x"} {
		t.Setenv("GOFLAGS", set)
		if have := compile.Go(t.Context(), "env").Env; !slices.Contains(have, "GOFLAGS="+want) {
			t.Errorf("GOFLAGS=%q: %q, want %q", set, have[len(have)-3:], want)
		}
	}
}
