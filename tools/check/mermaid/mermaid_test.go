package mermaid

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFind(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for name, content := range map[string]string{
		"README.md":     "# Title\n\n```mermaid\nflowchart LR\n    a --> b\n```\n\n```go\nx\n```\n- item\n  ```mermaid\n  pie\n  ```\n",
		"docs/a.md":     "```mermaid\nsequenceDiagram\n",
		"docs/b.txt":    "```mermaid\npie\n```\n",
		".cache/c.md":   "```mermaid\npie\n```\n",
		"bin/d.md":      "```mermaid\npie\n```\n",
		"docs/empty.md": "",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := find(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []diagram{
		{"README.md", 4, "flowchart LR\n    a --> b\n"},
		{"README.md", 13, "  pie\n"},
		{"docs/a.md", 2, "sequenceDiagram\n"},
	}
	if diff := cmp.Diff(want, have, cmp.AllowUnexported(diagram{})); diff != "" {
		t.Errorf("diagrams (-want +have):\n%s", diff)
	}
}
