// Echo.
package main

func main() {}
