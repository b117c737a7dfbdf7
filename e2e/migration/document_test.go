package main

import (
	"os/exec"
	"strings"
	"testing"
)

// Each section that the steps name has commands, which are about the cluster that they are taken for.
func TestDocument(t *testing.T) {
	doc, err := readDocument("../../docs/migration-lighthouse.md")
	if err != nil {
		t.Fatal(err)
	}
	for section, blocks := range map[string]int{"1. The broker and the bridge": 1, "2. Each cluster": 5, "Back": 3, "3. The end": 1, "4. ClusterSetIPs": 2} {
		if len(doc[section]) != blocks {
			t.Errorf("section %q has the blocks %q, want %d", section, doc[section], blocks)
		}
		for _, block := range doc[section] {
			text := forLab(block, "west")
			if strings.Contains(text, "east") || strings.Contains(text, "VERSION") || strings.Contains(text, "REGISTRY") {
				t.Errorf("for west: %s", text)
			}
			if out, err := exec.CommandContext(t.Context(), "sh", "-nc", text).CombinedOutput(); err != nil {
				t.Errorf("%s: %v %s", text, err, out)
			}
		}
	}
}

func TestParseDocument(t *testing.T) {
	doc := parseDocument("# Title\n\n## One\n\n1. Say\n\n   ```sh\n   a \\\n     b\n   ```\n\n```yaml\nno: command\n```\n## Two\n```sh\nc\n```\n```sh\nd\n```\n")
	if len(doc) != 2 || len(doc["One"]) != 1 || doc["One"][0] != "a \\\nb" || strings.Join(doc["Two"], " ") != "c d" {
		t.Errorf("the document has %q", doc)
	}
}
