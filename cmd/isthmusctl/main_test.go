package main

import (
	"testing"

	"github.com/go-logr/logr"
	"github.com/rogpeppe/go-internal/testscript"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
)

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	testscript.Main(m, map[string]func(){"isthmusctl": main, "kubectl-isthmus": main})
}

// TestCommandLine runs testdata/*.txtar: command lines with their output.
func TestCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata"})
}
