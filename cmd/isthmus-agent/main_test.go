package main

import (
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"isthmus-agent": main})
}

// TestCommandLine runs testdata/*.txtar: what an operator types, and the one sentence that comes back.
func TestCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata"})
}
