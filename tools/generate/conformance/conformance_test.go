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
		"room/room_test.go":       "package room\n\nimport \"testing\"\n\n" + tests,
		"bin/bin_test.go":         "no Go at all",
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
	root := tree(t, `
- {id: N1, about: One., kind: must}
- {id: N3, about: Three | four.}
- {id: N4, about: Four., waits: dns, why: No zone yet.}
- {id: N5, about: Five., see: [N1]}
- {id: N6, about: Six., outside: Somebody else does.}
- {id: N7, about: Seven., missing: A test.}
- {id: N8, about: Eight., tests: [TestOther], switch: --x}
- {id: N9, about: Nine., see: [N1, N4]}
- {id: N10, about: Ten., see: [N1, N7]}
- {id: N11, about: Eleven., see: [N6]}
`, `
func TestOne_N1_N3(t *testing.T) { t.Run("half of it_N3", func(t *testing.T) {}) }
func TestTable(t *testing.T) {
	for name := range map[string]int{"plain": 1, "of three_N3": 2} {
		t.Run(name, func(t *testing.T) {})
	}
}
func TestOther(t *testing.T) {}
`)
	page, err := Page(root)
	if err != nil {
		t.Fatal(err)
	}
	_, have, _ := strings.Cut(string(page), "| chapter ")
	const want = `| lines | tested | tested and partly waiting | waiting | not ours | missing |
| --- | --: | --: | --: | --: | --: | --: |
| [Ports and more](#ports-and-more) | 10 | 4 | 1 | 1 | 2 | 2 |

Missing: N7.

## Ports and more

Text.

|  | line | kind | switch | held by |
| --- | --- | --- | --- | --- |
| <a id="n1"></a>N1 | One. | must |  | [TestOne_N1_N3](../room/room_test.go) |
| <a id="n3"></a>N3 | Three \| four. |  |  | [TestOne_N1_N3](../room/room_test.go)<br>[TestOne_N1_N3/half_of_it_N3](../room/room_test.go)<br>[TestTable/of_three_N3](../room/room_test.go) |
| <a id="n4"></a>N4 | Four. |  |  | *waits for dns:* No zone yet. |
| <a id="n5"></a>N5 | Five. |  |  | [N1](#n1) |
| <a id="n6"></a>N6 | Six. |  |  | *not ours:* Somebody else does. |
| <a id="n7"></a>N7 | Seven. |  |  | **missing:** A test. |
| <a id="n8"></a>N8 | Eight. |  | --x | [TestOther](../room/room_test.go) |
| <a id="n9"></a>N9 | Nine. |  |  | [N1](#n1), [N4](#n4) |
| <a id="n10"></a>N10 | Ten. |  |  | [N1](#n1), [N7](#n7) |
| <a id="n11"></a>N11 | Eleven. |  |  | [N6](#n6) |
`
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("page (-want +have):\n%s", diff)
	}
}

func TestFaultsAreNamed(t *testing.T) {
	for name, c := range map[string]struct{ lines, tests, says string }{
		"no test":              {"- {id: N1, about: One.}", "", "line N1: no test holds it"},
		"unknown number":       {"- {id: N1, about: One.}", "func TestX_N1_N2(t *testing.T) {}", "TestX_N1_N2 names line N2"},
		"unknown test":         {"- {id: N1, about: One., tests: [TestY]}", "", "no test is called TestY"},
		"unknown reference":    {"- {id: N1, about: One., see: [L4]}", "", "line L4, which there is not"},
		"references in a row":  {"- {id: N1, about: One., outside: x}\n- {id: N2, about: Two., see: [N1]}\n- {id: N3, about: Three., see: [N2]}", "", "refers to others"},
		"waits without reason": {"- {id: N1, about: One., waits: dns}", "", "waits and why"},
		"waits for anything":   {"- {id: N1, about: One., waits: weather, why: x}", "", `"weather"`},
		"missing no more":      {"- {id: N1, about: One., missing: x}", "func TestX_N1(t *testing.T) {}", "take missing out"},
		"outside and tested":   {"- {id: N1, about: One., outside: x}", "func TestX_N1(t *testing.T) {}", "outside"},
		"number twice":         {"- {id: N1, about: One., outside: x}\n- {id: N1, about: One., outside: x}", "", "larger"},
		"another letter":       {"- {id: L1, about: One., outside: x}", "", `line "L1"`},
		"nothing said":         {"- {id: N1, outside: x}", "", "about is empty"},
		"unknown field":        {"- {id: N1, aobut: One., outside: x}", "", "aobut"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Page(tree(t, c.lines, c.tests))
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("want an error that says %q, got: %v", c.says, err)
			}
		})
	}
}
