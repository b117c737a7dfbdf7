package tree

import (
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

// Every relative link of a document leads to a file of the tree, and to a heading or an anchor in it.
func TestLinks(t *testing.T) {
	t.Parallel()
	pages := map[string]page{}
	sources(t, func(path string, content []byte) {
		if filepath.Ext(path) == ".md" {
			pages[path] = parsePage(string(content))
		}
	})
	if len(pages) == 0 {
		t.Fatal("found no document")
	}
	exists := func(path string) bool {
		_, err := os.Stat(filepath.Join(root, path))
		return err == nil
	}
	for _, path := range slices.Sorted(maps.Keys(pages)) {
		for _, fault := range brokenLinks(path, pages, exists) {
			t.Error(fault)
		}
	}
}

// page is what other documents and a reader can see of a Markdown document.
type page struct {
	links   []pageLink
	anchors map[string]bool
}

// pageLink is a link of a document.
type pageLink struct {
	line   int
	target string
}

// brokenLinks returns the faults of the relative links of the page at path.
func brokenLinks(path string, pages map[string]page, exists func(path string) bool) []string {
	var faults []string
	for _, l := range pages[path].links {
		u, err := url.Parse(l.target)
		if err != nil {
			faults = append(faults, fmt.Sprintf("%s:%d: link %q: %v", path, l.line, l.target, err))
			continue
		}
		if u.IsAbs() || u.Host != "" {
			continue
		}
		file := path
		if u.Path != "" {
			file = filepath.Join(filepath.Dir(path), u.Path)
		}
		target, isPage := pages[file]
		switch {
		case !isPage && !exists(file):
			faults = append(faults, fmt.Sprintf("%s:%d: link %q: there is no %s", path, l.line, l.target, file))
		case isPage && u.Fragment != "" && !target.anchors[u.Fragment]:
			faults = append(faults, fmt.Sprintf("%s:%d: link %q: %s has no heading #%s", path, l.line, l.target, file, u.Fragment))
		}
	}
	return faults
}

var (
	inlineCode    = regexp.MustCompile("`+[^`]*`+")
	inlineLink    = regexp.MustCompile(`\]\(\s*<?([^)\s>]+)>?[^)]*\)`)
	referenceLink = regexp.MustCompile(`^ {0,3}\[[^\]^][^\]]*\]:\s*<?([^\s>]+)`)
	htmlLink      = regexp.MustCompile(`<(?:a|img)\s[^>]*(?:href|src)="([^"]*)"`)
	htmlAnchor    = regexp.MustCompile(`<a\s[^>]*(?:id|name)="([^"]*)"`)
	heading       = regexp.MustCompile(`^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$`)
	linkText      = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
)

// parsePage finds the links and anchors of a Markdown document. Blocks of code have neither.
func parsePage(text string) page {
	p := page{anchors: map[string]bool{}}
	fence := ""
	for i, line := range strings.Split(text, "\n") {
		trimmed := strings.TrimLeft(line, " >")
		if mark := fenceOf(trimmed); mark != "" && (fence == "" || strings.HasPrefix(trimmed, fence)) {
			if fence == "" {
				fence = mark
			} else {
				fence = ""
			}
			continue
		}
		if fence != "" {
			continue
		}
		if m := heading.FindStringSubmatch(line); m != nil {
			p.addHeading(m[1])
		}
		for _, m := range htmlAnchor.FindAllStringSubmatch(line, -1) {
			p.anchors[m[1]] = true
		}
		prose := inlineCode.ReplaceAllString(line, "")
		for _, link := range []*regexp.Regexp{inlineLink, referenceLink, htmlLink} {
			for _, m := range link.FindAllStringSubmatch(prose, -1) {
				p.links = append(p.links, pageLink{i + 1, m[1]})
			}
		}
	}
	return p
}

// fenceOf returns the fence at the beginning of a line, "" if there is none.
func fenceOf(line string) string {
	for _, c := range []string{"`", "~"} {
		if n := len(line) - len(strings.TrimLeft(line, c)); n >= 3 {
			return strings.Repeat(c, n)
		}
	}
	return ""
}

// addHeading adds the anchor that GitHub gives to a heading. A second heading of one text gets "-1" at its end.
func (p *page) addHeading(text string) {
	text = strings.ReplaceAll(linkText.ReplaceAllString(text, "$1"), "`", "")
	slug := strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-', r == '_', unicode.IsLetter(r), unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, text)
	anchor := slug
	for n := 1; p.anchors[anchor]; n++ {
		anchor = fmt.Sprintf("%s-%d", slug, n)
	}
	p.anchors[anchor] = true
}

func TestBrokenLinks(t *testing.T) {
	t.Parallel()
	pages := map[string]page{
		"README.md": parsePage("# Use `it`, now\n## Twice\n## Twice\n" +
			"[good](docs/a.md#what-it-is) [folder](docs/) ![picture](docs/p.svg) [here](#use-it-now) [second](#twice-1) [web](https://example.org/x#y)\n" +
			"[gone](docs/b.md) [heading](docs/a.md#other) `[code](nothing.md)`\n```\n[block](nothing.md)\n```\n[ref]: docs/c.md\n<img src=\"docs/q.svg\">\n"),
		"docs/a.md": parsePage("What it is\n<a id=\"what-it-is\"></a>\n[up](../README.md) [outside](../../x.md)\n"),
	}
	exists := func(path string) bool { return slices.Contains([]string{"docs", "docs/p.svg"}, path) }
	want := map[string][]string{
		"README.md": {
			`README.md:5: link "docs/b.md": there is no docs/b.md`,
			`README.md:5: link "docs/a.md#other": docs/a.md has no heading #other`,
			`README.md:9: link "docs/c.md": there is no docs/c.md`,
			`README.md:10: link "docs/q.svg": there is no docs/q.svg`,
		},
		"docs/a.md": {`docs/a.md:3: link "../../x.md": there is no ../x.md`},
	}
	for path := range pages {
		if diff := cmp.Diff(want[path], brokenLinks(path, pages, exists)); diff != "" {
			t.Errorf("%s (-want +have):\n%s", path, diff)
		}
	}
}
