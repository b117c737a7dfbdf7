package conformance

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// test is a test of this repository: a function, or a subtest with a name that stands in the source.
type test struct {
	name  string // as `go test -run` takes it
	file  string // relative to the root, with slashes
	holds []string
}

func (t test) compare(o test) int {
	return cmp.Or(strings.Compare(t.file, o.file), strings.Compare(t.name, o.name))
}

// numbers matches the numbers at the end of a test's name.
var numbers = regexp.MustCompile(`(_[A-Z][0-9]+)+$`)

// holds returns the numbers of the lines that a test of this name holds.
func holds(name string) []string {
	suffix := numbers.FindString(name)
	if suffix == "" {
		return nil
	}
	return strings.Split(suffix[1:], "_")
}

// namedMarks returns the marks of tests by their names: those that end in lines' IDs, and those that a line lists.
func namedMarks(root string, chapters []Chapter) ([]Mark, error) {
	tests, err := findTests(root)
	if err != nil {
		return nil, err
	}
	byName := map[string][]test{}
	var marks []Mark
	add := func(t test, line string) {
		name, sub, _ := strings.Cut(t.name, "/")
		marks = append(marks, Mark{Package: path.Join(module, path.Dir(t.file)), Test: name, Subtest: sub, Line: line, file: t.file})
	}
	for _, t := range tests {
		byName[t.name] = append(byName[t.name], t)
		for _, id := range t.holds {
			add(t, id)
		}
	}
	for _, c := range chapters {
		for _, l := range c.Lines {
			for _, name := range l.Tests {
				if len(byName[name]) == 0 {
					return nil, fmt.Errorf("line %s: no test is called %s", l.ID, name)
				}
				for _, t := range byName[name] {
					add(t, l.ID)
				}
			}
		}
	}
	return marks, nil
}

// findTests returns all tests below root: every test function, and those subtests whose names end in
// numbers.
func findTests(root string) ([]test, error) {
	var tests []test
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			if path != root && (name == "bin" || name == "testdata" || name[0] == '.' || name[0] == '_') {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return fmt.Errorf("parse %s: %w", relative, err)
		}
		for _, t := range testsOf(file) {
			t.file = filepath.ToSlash(relative)
			tests = append(tests, t)
		}
		return nil
	})
	slices.SortFunc(tests, test.compare)
	return tests, err
}

// testsOf returns the tests of one file, without the file's name.
func testsOf(file *ast.File) []test {
	var tests []test
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Recv != nil || !strings.HasPrefix(f.Name.Name, "Test") || f.Body == nil {
			continue
		}
		tests = append(tests, test{name: f.Name.Name, holds: holds(f.Name.Name)})
		ast.Inspect(f.Body, func(n ast.Node) bool {
			if sub := subtestName(n); len(holds(sub)) > 0 {
				tests = append(tests, test{name: f.Name.Name + "/" + strings.ReplaceAll(sub, " ", "_"), holds: holds(sub)})
			}
			return true
		})
	}
	return tests
}

// subtestName returns the name of the subtest that n runs or is the table entry of, "" when n is neither.
func subtestName(n ast.Node) string {
	var name ast.Expr
	switch n := n.(type) {
	case *ast.CallExpr:
		f, ok := n.Fun.(*ast.SelectorExpr)
		if !ok || f.Sel.Name != "Run" || len(n.Args) != 2 {
			return ""
		}
		name = n.Args[0]
	case *ast.KeyValueExpr:
		name = n.Key
	}
	literal, ok := name.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return ""
	}
	text, err := strconv.Unquote(literal.Value)
	if err != nil {
		return ""
	}
	return text
}
