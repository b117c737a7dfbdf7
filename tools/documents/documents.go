// Package documents reads what Markdown pages show as code, so that tests run the commands that readers run.
package documents

import (
	"fmt"
	"os"
	"strings"
)

// Block is fenced code of a page.
type Block struct {
	Heading  string // the one above it, without number signs
	Language string // after the fence, such as sh; "": none
	Text     string // without the indentation of its fence; it ends with a newline
}

// Read returns the fenced code of a page, in order.
func Read(path string) ([]Block, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	blocks, err := parse(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return blocks, nil
}

// Commands returns the shell commands below a heading: blocks marked as sh.
func Commands(blocks []Block, heading string) (all []string) {
	for _, b := range blocks {
		if b.Heading == heading && b.Language == "sh" {
			all = append(all, b.Text)
		}
	}
	return all
}

const fence = "```"

func parse(text string) (blocks []Block, err error) {
	heading, indent := "", ""
	var open *Block
	for line := range strings.Lines(text) {
		trimmed := strings.TrimSpace(line)
		switch {
		case open != nil && trimmed == fence:
			blocks, open = append(blocks, *open), nil
		case open != nil:
			open.Text += strings.TrimPrefix(line, indent)
		case strings.HasPrefix(trimmed, fence):
			indent = line[:strings.Index(line, fence)]
			open = &Block{Heading: heading, Language: strings.TrimPrefix(trimmed, fence)}
		case strings.HasPrefix(line, "#"):
			heading = strings.TrimSpace(strings.TrimLeft(line, "#"))
		}
	}
	if open != nil {
		return nil, fmt.Errorf("the code below %q has no end", open.Heading)
	}
	return blocks, nil
}
