package main

import (
	"os"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/tools/apitest"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(envNode); dir != "" {
		runAsNode(dir)
		return
	}
	testscript.Main(withServer{m}, map[string]func(){"isthmus-agent": main})
}

// server is the API server of tests that need a real one.
var server apitest.Server

// withServer runs the tests with it.
type withServer struct{ tests *testing.M }

func (w withServer) Run() int { return apitest.Run(w.tests, &server) }

// TestCommandLine runs the scripts in testdata: commands, and the errors they print.
func TestCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata"})
}

// The help of every command and subcommand has an example.
func TestHelpHasExamples(t *testing.T) {
	var check func(*cobra.Command)
	check = func(c *cobra.Command) {
		if !strings.Contains(c.Example, c.CommandPath()) {
			t.Errorf("the help of %q has no example of it: %q", c.CommandPath(), c.Example)
		}
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check(newCommand())
}
