package main

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(envNode); dir != "" {
		runAsNode(dir)
		return
	}
	testscript.Main(m, map[string]func(){"isthmus-agent": main})
}

// TestCommandLine runs testdata/*.txtar: what an operator types, and the one sentence that comes back.
func TestCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata"})
}
