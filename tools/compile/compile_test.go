package compile_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/compile"
)

// What make compiles and what programs compile for themselves is the same, or everything would be compiled twice.
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
