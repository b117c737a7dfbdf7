package main

import "strings"

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
