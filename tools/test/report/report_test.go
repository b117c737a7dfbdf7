package report

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/generate/conformance"
)

func TestReport(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		events  string
		summary string
		shows   []string
		skips   []string
	}{
		"nothing": {"", "0 passed, 0 failed, 0 skipped", nil, nil},
		"a package without tests": {
			`{"Action":"output","Package":"p","Output":"?   \tp\t[no test files]\n"}
			 {"Action":"skip","Package":"p","Elapsed":0}`, "0 passed, 0 failed, 0 skipped", nil, nil,
		},
		"subtests count, their parent does not": {
			`{"Action":"pass","Package":"p","Test":"TestA/x"}
			 {"Action":"pass","Package":"p","Test":"TestA/y"}
			 {"Action":"pass","Package":"p","Test":"TestA"}
			 {"Action":"pass","Package":"p","Test":"TestAx"}
			 {"Action":"pass","Package":"p","Elapsed":1.5}`,
			"3 passed, 0 failed, 0 skipped",
			[]string{"ok", "1.5s", "3 passed"},
			nil,
		},
		"a slow test is shown when it ends": {
			`{"Action":"pass","Package":"p","Test":"TestA","Elapsed":31.4}
			 {"Action":"pass","Package":"p","Elapsed":32}`, "1 passed, 0 failed, 0 skipped", []string{"p TestA: pass after 31s"}, nil,
		},
		"a failed subtest tells its story once": {
			`{"Action":"output","Package":"p","Test":"TestA","Output":"the parent\n"}
			 {"Action":"output","Package":"p","Test":"TestA/x","Output":"the child\n"}
			 {"Action":"fail","Package":"p","Test":"TestA/x"}
			 {"Action":"pass","Package":"p","Test":"TestA/y"}
			 {"Action":"fail","Package":"p","Test":"TestA"}
			 {"Action":"fail","Package":"p"}`,
			"1 passed, 1 failed, 0 skipped",
			[]string{"--- FAIL: p TestA/x\nthe parent\nthe child\n", "FAIL p"},
			nil,
		},
		"attributes of a failed test are not shown": {
			`{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
			 {"Action":"output","Package":"p","Test":"TestA","Output":"=== ATTR  TestA conformance N1\n"}
			 {"Action":"attr","Package":"p","Test":"TestA","Key":"conformance","Value":"N1"}
			 {"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: wrong\n"}
			 {"Action":"fail","Package":"p","Test":"TestA"}
			 {"Action":"fail","Package":"p"}`,
			"0 passed, 1 failed, 0 skipped",
			[]string{"--- FAIL: p TestA\n=== RUN   TestA\n    a_test.go:1: wrong\n"},
			nil,
		},
		"a parent that fails beside its subtests": {
			`{"Action":"pass","Package":"p","Test":"TestA/x"}
			 {"Action":"fail","Package":"p","Test":"TestA"}
			 {"Action":"fail","Package":"p"}`,
			"1 passed, 1 failed, 0 skipped",
			[]string{"--- FAIL: p TestA\n"},
			nil,
		},
		"a package that does not build": {
			`{"ImportPath":"p [p.test]","Action":"build-output","Output":"p.go:1: no\n"}
			 {"ImportPath":"p [p.test]","Action":"build-fail"}
			 {"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}`,
			"0 passed, 1 failed, 0 skipped",
			[]string{"p.go:1: no"},
			nil,
		},
		"a package that panics in a test": {
			`{"Action":"pass","Package":"p","Test":"TestA"}
			 {"Action":"output","Package":"p","Test":"TestB","Output":"panic: nil pointer\n"}
			 {"Action":"output","Package":"p","Output":"FAIL\tp\n"}
			 {"Action":"fail","Package":"p"}`,
			"1 passed, 1 failed, 0 skipped",
			[]string{"--- FAIL: p\npanic: nil pointer\nFAIL\tp\n"},
			nil,
		},
		"a package that panics after its tests": {
			`{"Action":"pass","Package":"p","Test":"TestA"}
			 {"Action":"output","Package":"p","Output":"panic: leak\n"}
			 {"Action":"fail","Package":"p"}`,
			"1 passed, 1 failed, 0 skipped",
			[]string{"panic: leak"},
			nil,
		},
		"a skip says why": {
			`{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
			 {"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:7: needs root\n"}
			 {"Action":"skip","Package":"p","Test":"TestA"}
			 {"Action":"pass","Package":"p"}`,
			"0 passed, 0 failed, 1 skipped", nil,
			[]string{"p TestA: a_test.go:7: needs root"},
		},
		"two runs add up": {
			`{"Action":"pass","Package":"p","Test":"TestA"}
			 {"Action":"pass","Package":"p"}
			 {"Action":"pass","Package":"p","Test":"TestA"}
			 {"Action":"pass","Package":"p"}`, "2 passed, 0 failed, 0 skipped", nil, nil,
		},
		"what is no event": {"go: downloading x\n", "0 passed, 0 failed, 0 skipped", []string{"go: downloading x\n"}, nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			r := New(&out)
			if err := r.Read(strings.NewReader(tc.events)); err != nil {
				t.Fatal(err)
			}
			if have := r.Summary(); have != tc.summary {
				t.Errorf("have %q, want %q\n%s", have, tc.summary, &out)
			}
			for _, part := range tc.shows {
				if strings.Count(out.String(), part) != 1 {
					t.Errorf("%q is not shown once:\n%s", part, &out)
				}
			}
			if diff := cmp.Diff(tc.skips, r.Skips); diff != "" {
				t.Errorf("skips (-want +have):\n%s", diff)
			}
		})
	}
}

func TestSlowest(t *testing.T) {
	t.Parallel()
	r := New(&bytes.Buffer{})
	err := r.Read(strings.NewReader(`{"Action":"pass","Package":"p","Test":"TestA/x","Elapsed":4}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":4}
{"Action":"fail","Package":"p","Test":"TestB","Elapsed":7.6}
{"Action":"fail","Package":"p","Elapsed":12}
{"Action":"pass","Package":"q","Test":"TestC","Elapsed":3}
{"Action":"pass","Package":"q","Elapsed":5}
`))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"  12s p", "   8s p TestB", "   5s q", "   4s p TestA"}, r.Slowest(4)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if all := r.Slowest(100); len(all) != 5 {
		t.Errorf("all are %v, want 5", all)
	}
}

func TestUnreached(t *testing.T) {
	t.Parallel()
	mark := func(pkg, test, line string) conformance.Mark {
		return conformance.Mark{Package: pkg, Test: test, Line: line}
	}
	r := New(&bytes.Buffer{})
	r.Expect([]conformance.Mark{
		mark("p", "TestA", "N1"), mark("p", "TestA", "N2"), mark("p", "TestA", "N3"), mark("p", "TestA", "N3"),
		mark("p", "TestA", "N4"), mark("p", "TestFailed", "N1"), mark("p", "TestPartlySkipped", "N1"), mark("p", "TestNotRun", "N1"),
		mark("q", "TestA", "N2"),
	})
	err := r.Read(strings.NewReader(`{"Action":"attr","Package":"p","Test":"TestA","Key":"conformance","Value":"N1"}
{"Action":"attr","Package":"p","Test":"TestA/x","Key":"conformance","Value":"N2"}
{"Action":"attr","Package":"p","Test":"TestA","Key":"other","Value":"N3"}
{"Action":"attr","Package":"p","Test":"TestA","Key":"conformance-left-out","Value":"N4"}
{"Action":"pass","Package":"p","Test":"TestA/x"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p","Test":"TestFailed"}
{"Action":"skip","Package":"p","Test":"TestPartlySkipped/x"}
{"Action":"pass","Package":"p","Test":"TestPartlySkipped"}
{"Action":"fail","Package":"p"}
{"Action":"pass","Package":"q","Test":"TestA"}
{"Action":"pass","Package":"q"}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`p TestA passed and did not reach conformance.Holds(t, "N3")`,
		`q TestA passed and did not reach conformance.Holds(t, "N2")`,
	}
	if diff := cmp.Diff(want, r.Unreached); diff != "" {
		t.Errorf("unreached (-want +have):\n%s", diff)
	}
}
