package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
)

// docs/gateway-operation.md has the output of gateway show and gateway explain that TestAgainstAPIServer compares.
func TestGatewayDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/gateway-operation.md")
	if err != nil {
		t.Fatal(err)
	}
	script, err := txtar.ParseFile("testdata/server/gateway_explain.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"show.txt", "web.txt", "late.txt"} {
		i := slices.IndexFunc(script.Files, func(f txtar.File) bool { return f.Name == name })
		if i < 0 {
			t.Fatalf("the script has no %s", name)
		}
		if !strings.Contains(string(page), "\n"+string(script.Files[i].Data)+"```") {
			t.Errorf("docs/gateway-operation.md does not have the output in %s:\n%s", name, script.Files[i].Data)
		}
	}
}
