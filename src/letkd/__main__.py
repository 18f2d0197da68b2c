from letkd.cli.main import main

main()
