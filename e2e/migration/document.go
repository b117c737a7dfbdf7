package main

import "strings"

// forLab returns commands of the document for a cluster of the lab, whose images have no registry.
func forLab(block, cluster string) string {
	replace := []string{
		" --version 0.1.0 --set image.registry=registry.example.org/team", "",
		"registry.example.org/team/isthmus/controller:v0.1.0", "isthmus/controller:dev",
	}
	if cluster != "" {
		replace = append(replace, "east", cluster)
	}
	return strings.NewReplacer(replace...).Replace(block)
}
