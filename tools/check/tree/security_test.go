package tree

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A line of a table in docs/security.md that promises something names a test that exists, or says that it is not held yet.
func TestSecurityPageNamesTests(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join(root, "docs/security.md"))
	if err != nil {
		t.Fatal(err)
	}
	exists := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, found := range declared.FindAllSubmatch(text, -1) {
			exists[string(found[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(Test\\w+)`")
	held := false // the table has a column of tests
	for line := range strings.Lines(string(page)) {
		for _, found := range named.FindAllStringSubmatch(line, -1) {
			if !exists[found[1]] {
				t.Errorf("there is no test %s: %s", found[1], line)
			}
		}
		switch row := strings.HasPrefix(line, "| "); {
		case !row:
			held = false
		case strings.HasSuffix(line, "| held by |\n"):
			held = true
		case held && !strings.HasPrefix(line, "| ---") && !named.MatchString(line) && !strings.Contains(line, "not held yet"):
			t.Errorf("the line names no test, and does not say \"not held yet\": %s", line)
		}
	}
}
