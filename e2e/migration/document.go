package main

import (
	"os"
	"strings"
)

// document has the shell commands of a Markdown file: the blocks under each heading.
type document map[string][]string

// readDocument reads the blocks that are marked as sh.
func readDocument(path string) (document, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parseDocument(string(text)), nil
}

func parseDocument(text string) document {
	doc := document{}
	section := ""
	var block []string
	inside := false
	for line := range strings.Lines(text) {
		switch trimmed := strings.TrimSpace(line); {
		case !inside && trimmed == "```sh":
			inside, block = true, nil
		case inside && trimmed == "```":
			inside = false
			doc[section] = append(doc[section], strings.Join(block, "\n"))
		case inside:
			block = append(block, trimmed)
		case strings.HasPrefix(line, "#"):
			section = strings.TrimSpace(strings.TrimLeft(line, "#"))
		}
	}
	return doc
}

// forLab returns commands of the document for a cluster of the lab, whose images have no registry.
func forLab(block, cluster string) string {
	replace := []string{
		" --set image.registry=REGISTRY --set image.tag=VERSION", "",
		"REGISTRY/isthmus/controller:VERSION", "isthmus/controller:dev",
	}
	if cluster != "" {
		replace = append(replace, "east", cluster)
	}
	return strings.NewReplacer(replace...).Replace(block)
}
