package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tree writes a repository of one chapter and one test file.
func tree(t *testing.T, lines, tests string) string {
	t.Helper()
	root := t.TempDir()
	for path, content := range map[string]string{
		"docs/conformance/a.yaml": "title: Ports and more\nabout: Text.\nletter: \"N\"\nlines:\n" + lines,
		"ports/ports_test.go":     "package ports\n\nimport (\n\t\"testing\"\n\n\t\"" + marker + "\"\n)\n\n" + tests,
		"bin/bin_test.go":         "no Go, but \"" + marker + "\"",
		"names/names.go":          "// Package names explains \"" + marker + "\".\npackage names\n\nfunc x() { conformance.Holds() }\n",
	} {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestPage(t *testing.T) {
	t.Parallel()
	root := tree(t, `
- {id: N1, about: One., kind: must}
- {id: N3, about: Three | four.}
- {id: N5, about: Five., see: [N1]}
- {id: N6, about: Six., outside: Other projects do this.}
- {id: N7, about: Seven., missing: A test.}
- {id: N8, about: Eight., switch: --x}
- {id: N10, about: Ten., see: [N1, N7]}
- {id: N11, about: Eleven., see: [N6]}
`, `
func TestOne(t *testing.T) {
	conformance.Holds(t, "N1", "N3")
	t.Run("half of it", func(t *testing.T) {
		conformance.Holds(t, "N3")
		conformance.Holds(t, "N3")
		t.Run("deeper", func(t *testing.T) { conformance.Holds(t, "N8") })
	})
	for name := range map[string]int{"a": 1} {
		t.Run(name, func(t *testing.T) {
			t.Run("literal", func(t *testing.T) { conformance.Holds(t, "N8") })
		})
	}
}
`)
	page, err := Page(root)
	if err != nil {
		t.Fatal(err)
	}
	_, have, _ := strings.Cut(string(page), "| chapter ")
	const want = `| lines | tested | not ours | missing |
| --- | --: | --: | --: | --: |
| [Ports and more](#ports-and-more) | 8 | 4 | 2 | 2 |

Missing: N7.

## Ports and more

Text.

|  | line | kind | switch | shown by |
| --- | --- | --- | --- | --- |
| <a id="n1"></a>N1 | One. | must |  | [TestOne](../ports/ports_test.go) |
| <a id="n3"></a>N3 | Three \| four. |  |  | [TestOne](../ports/ports_test.go)<br>[TestOne/half_of_it](../ports/ports_test.go) |
| <a id="n5"></a>N5 | Five. |  |  | [N1](#n1) |
| <a id="n6"></a>N6 | Six. |  |  | *not ours:* Other projects do this. |
| <a id="n7"></a>N7 | Seven. |  |  | **missing:** A test. |
| <a id="n8"></a>N8 | Eight. |  | --x | [TestOne](../ports/ports_test.go)<br>[TestOne/half_of_it/deeper](../ports/ports_test.go) |
| <a id="n10"></a>N10 | Ten. |  |  | [N1](#n1), [N7](#n7) |
| <a id="n11"></a>N11 | Eleven. |  |  | [N6](#n6) |
`
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("page (-want +have):\n%s", diff)
	}
}

// Two packages may have tests of one name; only the one that calls Holds is marked.
func TestMarksBelongToTheirPackage(t *testing.T) {
	t.Parallel()
	root := tree(t, "", "func TestOne(t *testing.T) { conformance.Holds(t, \"N1\") }")
	other := filepath.Join(root, "ports/other_test.go")
	if err := os.WriteFile(other, []byte("package ports_test\n\nimport lines \""+marker+"\"\n\nfunc TestTwo(t *testing.T) { lines.Holds(t, \"N2\") }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "names/names_test.go"), []byte("package names\n\nfunc TestOne(t *testing.T) {}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	have, err := Marks(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []Mark{
		{Package: module + "/ports", Test: "TestTwo", Line: "N2", file: "ports/other_test.go"},
		{Package: module + "/ports", Test: "TestOne", Line: "N1", file: "ports/ports_test.go"},
	}
	if diff := cmp.Diff(want, have, cmp.AllowUnexported(Mark{})); diff != "" {
		t.Errorf("marks (-want +have):\n%s", diff)
	}
}

func TestPageNamesFaults(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ lines, tests, says string }{
		"line without a test":       {"- {id: N1, about: One.}", "", `line N1: no test shows it; write one that calls conformance.Holds(t, "N1")`},
		"mark of an unknown line":   {"- {id: N1, about: One.}", `func TestX(t *testing.T) { conformance.Holds(t, "N1", "N2") }`, "ports/ports_test.go: TestX names line N2"},
		"unknown reference":         {"- {id: N1, about: One., see: [L4]}", "", "line L4, which does not exist"},
		"references in a row":       {"- {id: N1, about: One., outside: x}\n- {id: N2, about: Two., see: [N1]}\n- {id: N3, about: Three., see: [N2]}", "", "refers to others"},
		"missing and tested":        {"- {id: N1, about: One., missing: x}", `func TestX(t *testing.T) { conformance.Holds(t, "N1") }`, "remove missing"},
		"outside and tested":        {"- {id: N1, about: One., outside: x}", `func TestX(t *testing.T) { conformance.Holds(t, "N1") }`, "outside"},
		"number twice":              {"- {id: N1, about: One., outside: x}\n- {id: N1, about: One., outside: x}", "", "larger"},
		"another letter":            {"- {id: L1, about: One., outside: x}", "", `line "L1"`},
		"nothing promised":          {"- {id: N1, outside: x}", "", "about is empty"},
		"unknown field":             {"- {id: N1, aobut: One., outside: x}", "", "aobut"},
		"mark in a called function": {"- {id: N1, about: One.}", `func check(t *testing.T) { conformance.Holds(t, "N1") }`, "ports/ports_test.go:9:28: conformance.Holds stands outside of a test function"},
		"mark in a benchmark":       {"- {id: N1, about: One.}", `func BenchmarkX(b *testing.B) { conformance.Holds(b, "N1") }`, "outside of a test function"},
		"line that is no literal":   {"- {id: N1, about: One.}", `func TestX(t *testing.T) { conformance.Holds(t, lines...) }`, "must be a literal"},
		"line that is no ID":        {"- {id: N1, about: One.}", `func TestX(t *testing.T) { conformance.Holds(t, "N1 N2") }`, "must be a literal"},
		"mark without a line":       {"- {id: N1, about: One.}", `func TestX(t *testing.T) { conformance.Holds(t) }`, "names no line"},
		"mark under a condition":    {"- {id: N1, about: One.}", `func TestX(t *testing.T) { if ok() { conformance.Holds(t, "N1") } }`, `call conformance.LeaveOut(t, "N1")`},
		"another line left out":     {"- {id: N1, about: One.}", `func TestX(t *testing.T) { if ok() { conformance.Holds(t, "N1") } else { conformance.LeaveOut(t, "N2") } }`, `call conformance.LeaveOut(t, "N1")`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Page(tree(t, c.lines, c.tests))
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error: %v\nwant it to say %q", err, c.says)
			}
		})
	}
}
