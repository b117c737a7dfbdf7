package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// module is the path of this repository's Go module.
const module = "github.com/isthmus-net/isthmus"

// marker is the package whose function Holds marks a test.
const marker = module + "/tools/conformance"

// Mark is a call of conformance.Holds in a test, for one line.
type Mark struct {
	// Package is the import path of the package that the test belongs to, without "_test".
	Package string
	// Test is the test function's name. Subtest is "", or the path below it of the subtests around the call whose
	// names are literals.
	Test, Subtest string
	// Line is the line's ID.
	Line string

	file string // relative to the root, with slashes
}

// name returns the name of the test as `go test -run` takes it.
func (m Mark) name() string {
	if m.Subtest == "" {
		return m.Test
	}
	return m.Test + "/" + m.Subtest
}

// lineID matches the ID of a line.
var lineID = regexp.MustCompile(`^[A-Z][0-9]+$`)

// Marks returns all marks of the repository at root. Its error joins all calls that cannot be read from the source:
// those outside of a test function, those whose lines are not literals, and those under an if whose lines are never left out.
func Marks(root string) ([]Mark, error) {
	var marks []Mark
	var errs []error
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
		if filepath.Ext(name) != ".go" {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(source, []byte(`"`+marker+`"`)) {
			return err
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		found, err := marksOf(filepath.ToSlash(relative), source)
		marks, errs = append(marks, found...), append(errs, err)
		return nil
	})
	return marks, errors.Join(append(errs, err)...)
}

// marksOf returns the marks of one file.
func marksOf(file string, source []byte) ([]Mark, error) {
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, source, parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", file, err)
	}
	r := reader{file: file, fset: fset, pkg: path.Join(module, path.Dir(file))}
	for _, i := range parsed.Imports {
		if i.Path.Value == `"`+marker+`"` {
			r.local = "conformance"
			if i.Name != nil {
				r.local = i.Name.Name
			}
		}
	}
	if r.local == "" {
		return nil, nil // another file's text mentions the path
	}
	for _, d := range parsed.Decls {
		test := ""
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") && strings.HasSuffix(file, "_test.go") {
			test = f.Name.Name
		}
		r.read(d, test, nil)
		r.checkConditions(d)
	}
	return r.marks, errors.Join(r.errs...)
}

// reader collects the marks of one file.
type reader struct {
	file, pkg string
	local     string // the name under which the file knows the marker
	fset      *token.FileSet
	marks     []Mark
	errs      []error
}

// read collects the marks below n, a part of the test function test and of its subtests. The name of a subtest is ""
// where it is no literal.
func (r *reader) read(n ast.Node, test string, subtests []string) {
	ast.Inspect(n, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if r.calls(call, "Holds") {
			r.add(call, test, subtests)
			return false
		}
		name, body := subtest(call)
		if body == nil {
			return true
		}
		r.read(body, test, append(slices.Clone(subtests), name))
		return false
	})
}

// checkConditions adds an error for each line that a function shows under a condition and never leaves out: where the
// condition is false, for example on a machine without a program, the test would pass and the run would fail.
func (r *reader) checkConditions(function ast.Node) {
	leftOut := map[string]bool{}
	r.each(function, "LeaveOut", func(call *ast.CallExpr) {
		for _, line := range lineArgs(call) {
			leftOut[line] = true
		}
	})
	ast.Inspect(function, func(n ast.Node) bool {
		condition, ok := n.(*ast.IfStmt)
		if !ok {
			return true
		}
		r.each(condition, "Holds", func(call *ast.CallExpr) {
			for _, line := range lineArgs(call) {
				if !leftOut[line] {
					r.errs = append(r.errs, fmt.Errorf("%s: conformance.Holds stands under an if; call conformance.LeaveOut(t, %q) where the test does not reach it", r.fset.Position(call.Pos()), line))
				}
			}
		})
		return false
	})
}

// each calls f with the calls of a function of package conformance below n.
func (r *reader) each(n ast.Node, function string, f func(*ast.CallExpr)) {
	ast.Inspect(n, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && r.calls(call, function) {
			f(call)
		}
		return true
	})
}

// lineArgs returns the lines that a call of Holds or LeaveOut names by literals.
func lineArgs(call *ast.CallExpr) []string {
	var lines []string
	for _, arg := range call.Args[min(1, len(call.Args)):] {
		if line, ok := literal(arg); ok {
			lines = append(lines, line)
		}
	}
	return lines
}

// calls reports whether call calls a function of package conformance.
func (r *reader) calls(call *ast.CallExpr, function string) bool {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || f.Sel.Name != function {
		return false
	}
	x, ok := f.X.(*ast.Ident)
	return ok && x.Name == r.local
}

// add adds the marks of one call.
func (r *reader) add(call *ast.CallExpr, test string, subtests []string) {
	fault := func(format string, args ...any) {
		r.errs = append(r.errs, fmt.Errorf("%s: "+format, append([]any{r.fset.Position(call.Pos())}, args...)...))
	}
	if test == "" {
		fault("conformance.Holds stands outside of a test function; move it into the tests that show its lines")
		return
	}
	if len(call.Args) < 2 {
		fault("conformance.Holds names no line")
		return
	}
	if i := slices.Index(subtests, ""); i >= 0 {
		subtests = subtests[:i]
	}
	for _, arg := range call.Args[1:] {
		id, ok := literal(arg)
		if !ok || !lineID.MatchString(id) {
			fault(`each line of conformance.Holds must be a literal such as "N26"`)
			continue
		}
		r.marks = append(r.marks, Mark{Package: r.pkg, Test: test, Subtest: strings.Join(subtests, "/"), Line: id, file: r.file})
	}
}

// subtest returns the body of the subtest that call runs, and its name if that is a literal.
func subtest(call *ast.CallExpr) (name string, body *ast.FuncLit) {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || f.Sel.Name != "Run" || len(call.Args) != 2 {
		return "", nil
	}
	body, ok = call.Args[1].(*ast.FuncLit)
	if !ok {
		return "", nil
	}
	name, _ = literal(call.Args[0])
	return strings.ReplaceAll(name, " ", "_"), body
}

// literal returns the value of a string literal.
func literal(e ast.Expr) (string, bool) {
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(l.Value)
	return text, err == nil
}
