package main

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/documents"
)

// Each section that the steps name has commands, which are about the cluster that they are taken for.
func TestDocument(t *testing.T) {
	doc, err := documents.Read("../../docs/migration-lighthouse.md")
	if err != nil {
		t.Fatal(err)
	}
	for section, blocks := range map[string]int{"1. The broker and the bridge": 1, "2. Each cluster": 5, "Back": 3, "3. The end": 1, "4. ClusterSetIPs": 2} {
		all := documents.Commands(doc, section)
		if len(all) != blocks {
			t.Errorf("section %q has the blocks %q, want %d", section, all, blocks)
		}
		for _, block := range all {
			text := forLab(block, "west")
			if strings.Contains(text, "east") || strings.Contains(text, "0.1.0") || strings.Contains(text, "registry.example.org/team/isthmus") {
				t.Errorf("for west: %s", text)
			}
			if out, err := exec.CommandContext(t.Context(), "sh", "-nc", text).CombinedOutput(); err != nil {
				t.Errorf("%s: %v %s", text, err, out)
			}
		}
	}
}
