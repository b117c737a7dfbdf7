package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// clusterSetZone is the DNS zone of a ClusterSet.
const clusterSetZone = "clusterset.local"

// The stub in a Corefile begins and ends with these lines.
const (
	stubBegin = "# isthmus: begin, written by isthmusctl dns install and removed by isthmusctl dns uninstall\n"
	stubEnd   = "# isthmus: end\n"
	// The prefixes identify the lines; the rest is for people.
	stubBeginMark = "# isthmus: begin"
	stubEndMark   = "# isthmus: end"
)

// stub is a server block that forwards the zone of the ClusterSet to agents.
type stub struct {
	// Key is the zone, with the port of the Corefile's other blocks.
	Key string
	// Directives are bind and prometheus as in the other blocks, one per line.
	Directives []string
	// Upstreams are tried in this order.
	Upstreams []string
	// Replaced is the text of the foreign server block in whose place the stub stands, or "". The stub keeps it as a comment.
	Replaced string
}

// replacedMark begins each line of what a stub replaces.
const replacedMark = "#| "

// String formats the stub for a Corefile. It has no cache, so that changes are visible at once, and tries the next upstream
// as soon as one refuses or does not answer.
func (s stub) String() string {
	var b strings.Builder
	b.WriteString(stubBegin)
	for line := range strings.Lines(s.Replaced) {
		b.WriteString(replacedMark + line)
	}
	fmt.Fprintf(&b, "%s {\n    errors\n", s.Key)
	for _, d := range s.Directives {
		fmt.Fprintf(&b, "    %s\n", d)
	}
	fmt.Fprintf(&b, "    forward . %s {\n        policy sequential\n    }\n}\n", strings.Join(s.Upstreams, " "))
	b.WriteString(stubEnd)
	return b.String()
}

// corefile is the configuration of a CoreDNS, in parts.
type corefile struct {
	before, own, after string // own is the stub, or ""
	replaced           string // what the stub replaces, or ""
	blocks             []serverBlock
}

// serverBlock is a foreign server block, with the tokens of each line. In the text around the stub it begins with line first and
// ends with line last, counted from 0.
type serverBlock struct {
	keys        []string
	lines       [][]string
	first, last int
}

// parseCorefile parses a Corefile. Its error names what to correct in it.
func parseCorefile(text string) (corefile, error) {
	var c corefile
	var err error
	if c.before, c.own, c.after, err = cutStub(text); err != nil {
		return corefile{}, err
	}
	for line := range strings.Lines(c.own) {
		if was, ok := strings.CutPrefix(line, replacedMark); ok {
			c.replaced += was
		}
	}
	if c.blocks, err = parseBlocks(c.before + c.after); err != nil {
		return corefile{}, err
	}
	return c, nil
}

// replacing returns c with the place of its foreign block for the zone as that of the stub. It returns c itself if there is a stub, or
// not exactly one such block, or if that has other zones too. The lines with which Submariner's operator marks the block belong to it:
// the operator removes everything between them.
func (c corefile) replacing() corefile {
	isOfZone := func(b serverBlock) bool {
		return !slices.ContainsFunc(b.keys, func(key string) bool { return zoneOf(key) != clusterSetZone })
	}
	i := slices.IndexFunc(c.blocks, isOfZone)
	if c.own != "" || i < 0 || slices.ContainsFunc(c.blocks[i+1:], isOfZone) {
		return c
	}
	b := c.blocks[i]
	lines := slices.Collect(strings.Lines(c.after))
	if b.first > 0 && b.last+1 < len(lines) && strings.HasPrefix(lines[b.first-1], "#lighthouse-start") && strings.HasPrefix(lines[b.last+1], "#lighthouse-end") {
		b.first, b.last = b.first-1, b.last+1
	}
	join := func(lines []string) string { return strings.Join(lines, "") }
	c.before, c.replaced, c.after = join(lines[:b.first]), join(lines[b.first:b.last+1]), join(lines[b.last+1:])
	if !strings.HasSuffix(c.replaced, "\n") {
		c.replaced += "\n"
	}
	c.blocks = slices.Delete(slices.Clone(c.blocks), i, i+1)
	return c
}

// cutStub splits a Corefile at the stub.
func cutStub(text string) (before, own, after string, err error) {
	begin, end, at := -1, -1, 0
	for line := range strings.Lines(text) {
		switch trimmed := strings.TrimSpace(line); {
		case strings.HasPrefix(trimmed, stubBeginMark) && begin < 0:
			begin = at
		case strings.HasPrefix(trimmed, stubEndMark) && begin >= 0 && end < 0:
			end = at + len(line)
		case strings.HasPrefix(trimmed, stubBeginMark), strings.HasPrefix(trimmed, stubEndMark):
			return "", "", "", fmt.Errorf("the line %q is in a wrong place; remove the block of Isthmus by hand", trimmed)
		}
		at += len(line)
	}
	switch {
	case begin < 0:
		return "", "", text, nil // the stub goes to the top, where it ends with its own line
	case end < 0:
		return "", "", "", fmt.Errorf("the line %q has no line %q after it; remove the block of Isthmus by hand", stubBeginMark, stubEndMark)
	}
	return text[:begin], text[begin:end], text[end:], nil
}

// with returns the Corefile with another stub, or without one and with what that replaced. It keeps the other text byte by byte.
func (c corefile) with(s *stub) string {
	if s == nil {
		return c.before + c.replaced + c.after
	}
	return c.before + s.String() + c.after
}

// errForeignZone means that a foreign block has clusterset.local.
var errForeignZone = errors.New("a foreign configuration names " + clusterSetZone)

// refusal returns the reason why a stub must not be added, or nil.
func (c corefile) refusal() error {
	for _, b := range c.blocks {
		for _, key := range b.keys {
			if zoneOf(key) == clusterSetZone {
				return fmt.Errorf("%w: the server block %q; let this one take its place with --replace, or leave the name resolution to it", errForeignZone, key)
			}
		}
		for _, line := range b.lines {
			if slices.ContainsFunc(line, func(token string) bool { return zoneOf(token) == clusterSetZone }) {
				return fmt.Errorf("%w: the line %q in block %q; remove it first, or leave the name resolution to it",
					errForeignZone, strings.Join(line, " "), strings.Join(b.keys, " "))
			}
		}
	}
	return nil
}

// reloads reports whether CoreDNS reloads a changed Corefile by itself.
func (c corefile) reloads() bool {
	return slices.ContainsFunc(c.blocks, func(b serverBlock) bool { return b.line("reload") != nil })
}

// stub returns a stub for upstreams that matches the other blocks.
func (c corefile) stub(upstreams []string) (stub, error) {
	like, key, ok := c.like()
	if !ok {
		return stub{}, errors.New("it has no server block for cluster.local or for all names; give the Corefile of the cluster's DNS")
	}
	s := stub{Key: clusterSetZone, Upstreams: upstreams, Replaced: c.replaced}
	if _, port := splitKey(key); port != "" {
		s.Key += ":" + port
	}
	for _, name := range []string{"bind", "prometheus"} {
		if line := like.line(name); line != nil {
			s.Directives = append(s.Directives, strings.Join(line, " "))
		}
	}
	return s, nil
}

// like returns the block that serves the cluster's own names, and its key for them.
func (c corefile) like() (serverBlock, string, bool) {
	for _, zone := range []string{"cluster.local", "."} {
		for _, b := range c.blocks {
			for _, key := range b.keys {
				if z := zoneOf(key); z == zone && !strings.Contains(strings.TrimPrefix(key, "dns://"), "://") {
					return b, key, true
				}
			}
		}
	}
	// A cluster may have another domain.
	for _, b := range c.blocks {
		if b.line("kubernetes") != nil {
			return b, b.keys[0], true
		}
	}
	return serverBlock{}, "", false
}

// line returns the tokens of a directive of b, or nil.
func (b serverBlock) line(directive string) []string {
	for _, l := range b.lines {
		if l[0] == directive {
			return l
		}
	}
	return nil
}

// addresses returns the addresses of s; none means all of the machine.
func (s stub) addresses() []netip.Addr {
	var all []netip.Addr
	for _, d := range s.Directives {
		words := strings.Fields(d)
		for _, w := range words[1:] {
			if a, err := netip.ParseAddr(w); err == nil && words[0] == "bind" {
				all = append(all, a)
			}
		}
	}
	return all
}

// port returns the port of the stub.
func (s stub) port() string {
	if _, port := splitKey(s.Key); port != "" {
		return port
	}
	return "53"
}

// splitKey splits the key of a server block: [dns://]zone[:port].
func splitKey(key string) (zone, port string) {
	if _, rest, ok := strings.Cut(key, "://"); ok {
		key = rest
	}
	if host, port, err := net.SplitHostPort(key); err == nil {
		return host, port
	}
	return key, ""
}

// zoneOf returns the zone of a key or another word, in lower case and without the trailing dot.
func zoneOf(key string) string {
	zone, _ := splitKey(key)
	if zone == "." || zone == "" {
		return "."
	}
	return strings.ToLower(strings.TrimSuffix(zone, "."))
}

// parseBlocks parses the braces and words of the server blocks of a Corefile, see corefile(5).
func parseBlocks(text string) ([]serverBlock, error) {
	lines, err := words(text)
	if err != nil {
		return nil, err
	}
	var blocks []serverBlock
	var keys []string
	depth, first := 0, 0
	for number, line := range lines {
		if len(line) == 0 {
			continue
		}
		opens, closes := line[len(line)-1] == "{", line[0] == "}"
		switch {
		case depth == 0 && closes:
			return nil, errors.New("it has a closing brace without an opening one; correct it first")
		case depth == 0:
			if len(keys) == 0 {
				first = number
			}
			for _, word := range line {
				if word = strings.Trim(word, ","); word != "{" && word != "" {
					keys = append(keys, word)
				}
			}
			if opens {
				if len(keys) == 0 {
					return nil, errors.New("a server block has no zone; correct it first")
				}
				blocks, keys = append(blocks, serverBlock{keys: keys, first: first}), nil
			}
		case !closes:
			b := &blocks[len(blocks)-1]
			b.lines = append(b.lines, slices.DeleteFunc(slices.Clone(line), func(w string) bool { return w == "{" }))
		}
		if closes {
			depth--
			blocks[len(blocks)-1].last = number
		}
		if opens {
			depth++
		}
	}
	if depth != 0 || len(keys) > 0 {
		return nil, errors.New("its server blocks are not all in braces; correct it first")
	}
	return blocks, nil
}

// words returns the words of each line, without comments. It joins quoted words and drops the quotes.
func words(text string) ([][]string, error) {
	var lines [][]string
	for line := range strings.Lines(text) {
		var found []string
		for rest := strings.TrimSpace(line); rest != "" && rest[0] != '#'; rest = strings.TrimSpace(rest) {
			if rest[0] != '"' {
				n := strings.IndexAny(rest, " \t")
				if n < 0 {
					n = len(rest)
				}
				found, rest = append(found, rest[:n]), rest[n:]
				continue
			}
			word, after, ok := strings.Cut(rest[1:], `"`)
			if !ok {
				return nil, fmt.Errorf("the quotes of %s do not end on its line; correct it first", strings.TrimSpace(line))
			}
			found, rest = append(found, word), after
		}
		lines = append(lines, found)
	}
	return lines, nil
}

// diff formats the only difference of two texts, with three lines of context.
func diff(name, have, want string) string {
	const around = 3
	a, b := splitLines(have), splitLines(want)
	start := 0
	for start < min(len(a), len(b)) && a[start] == b[start] {
		start++
	}
	endA, endB := len(a), len(b)
	for endA > start && endB > start && a[endA-1] == b[endB-1] {
		endA--
		endB--
	}
	first := max(0, start-around)
	lastA := min(len(a), endA+around)
	var out strings.Builder
	fmt.Fprintf(&out, "--- %s\n+++ %s\n@@ -%d,%d +%d,%d @@\n", name, name, first+1, lastA-first, first+1, lastA-first+(endB-endA))
	write := func(mark string, lines []string) {
		for _, l := range lines {
			out.WriteString(mark + l + "\n")
		}
	}
	write(" ", a[first:start])
	write("-", a[start:endA])
	write("+", b[start:endB])
	write(" ", a[endA:lastA])
	return out.String()
}

// splitLines returns the lines of a text without line ends.
func splitLines(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(text, "\n"), "\n")
}
