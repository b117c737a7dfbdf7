package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/test/report"
)

// Every fuzz target of the repository is found, as a search for its name shows.
func TestFuzzTargets(t *testing.T) {
	targets, err := fuzzTargets(t.Context(), []string{module + "..."})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []fuzzTarget{{module + "dns/internal/server", "FuzzParse"}, {module + "dns/internal/server", "FuzzRespond"}, {module + "bpf", "FuzzPacket"}} {
		if !slices.Contains(targets, want) {
			t.Errorf("%v is not among %v", want, targets)
		}
	}
	named := 0
	err = filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if path == "../../bin" { // it may hold the sources of a release
			return filepath.SkipDir
		}
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		named += bytes.Count(source, []byte("\nfunc "+"Fuzz"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(targets) != named {
		t.Errorf("found %d targets, want %d: %v", len(targets), named, targets)
	}
}

// A fuzzer that fails at the end of its time alone has found nothing. One with a failing input has failed, whatever else it says.
func TestFuzzEndsLate(t *testing.T) {
	t.Parallel()
	late := []byte(`{"Action":"output","Package":"p","Test":"FuzzA","Output":"    context deadline exceeded\n"}
{"Action":"fail","Package":"p","Test":"FuzzA"}
{"Action":"fail","Package":"p"}
`)
	found := append(slices.Clone(late), []byte(`{"Action":"output","Package":"p","Output":"    Failing input written to testdata/fuzz/FuzzA/1\n"}`)...)
	if !endedLate(late) || endedLate(found) || endedLate([]byte(`{"Action":"fail","Package":"p","Test":"FuzzA"}`)) {
		t.Errorf("late: %v, with a failing input: %v", endedLate(late), endedLate(found))
	}
	r := report.New(&bytes.Buffer{})
	if err := r.Read(bytes.NewReader(fuzzTarget{"p", "FuzzA"}.passed(2 * time.Second))); err != nil {
		t.Fatal(err)
	}
	if have := r.Summary(); have != "1 passed, 0 failed, 0 skipped" {
		t.Errorf("the report of a target that found nothing: %s", have)
	}
}
