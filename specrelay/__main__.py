from specrelay.cli import main

main()
